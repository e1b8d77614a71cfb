"""Trees: growth and selection against a plain numpy oracle, masks, sizes that cannot exist."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.cache import empty_cache
from eagle3_jax.drafting import grow
from eagle3_jax.tree import Chain, Pool, Tree, ancestor_mask, select

U = 12


class TableDraft:
    """A draft whose logits depend on (path of tokens) alone: a hash of the path, so that an oracle can recompute them."""

    taps = (0,)
    target_ids = jnp.arange(U, dtype=jnp.int32) * 2 + 1

    def __init__(self, seed: int, coarse: bool):
        self.seed, self.coarse = seed, coarse

    def logits(self, code: np.ndarray) -> np.ndarray:
        """float32 [..., U] from integer path codes [...]."""
        x = np.sin(np.asarray(code, np.float64)[..., None] * 12.9898 + np.arange(U) * 78.233 + self.seed) * 43758.5453
        x = (x - np.floor(x)) * 3
        return (np.round(x) if self.coarse else x).astype(np.float32)

    def expand(self, embed, cache, tokens_BW, carry_BWD, mask_BWR, earlier):
        code = (carry_BWD[..., 0] * 31 + tokens_BW.astype(jnp.float32)) % 9973
        rows = tokens_BW.shape[1] + (0 if earlier is None else earlier[0].shape[1])
        kv = jnp.zeros((tokens_BW.shape[0], rows, 1, 2))
        return jnp.asarray(self.logits(np.asarray(code))), code[..., None], (kv, kv)


def log_softmax(x):
    x = x.astype(np.float32)
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True, dtype=np.float32))


def oracle(draft, root_code, tree):
    """Nodes as Python objects: grow level by level, keep the best nodes-1, parents before children."""
    ids = np.asarray(draft.target_ids)
    pool, frontier = [], []
    scores = log_softmax(draft.logits(root_code))
    for u in np.argsort(-scores, kind="stable")[: tree.width]:
        pool.append(dict(token=int(ids[u]), score=scores[u], parent=-1, code=root_code))
    frontier = list(range(tree.width))
    for level in range(1, tree.depth):
        children = []
        for f in frontier:
            code = np.float32((np.float32(pool[f]["code"]) * 31 + pool[f]["token"]) % 9973)
            scores = log_softmax(draft.logits(code))
            for u in np.argsort(-scores, kind="stable")[: tree.width]:
                children.append(dict(token=int(ids[u]), score=np.float32(pool[f]["score"] + scores[u]), parent=f, code=code))
        base = len(pool)
        pool += children
        if level + 1 < tree.depth:
            best = np.argsort([-c["score"] for c in children], kind="stable")[: tree.width]
            frontier = [base + int(b) for b in best]
    kept = sorted(np.argsort([-c["score"] for c in pool], kind="stable")[: tree.nodes - 1].tolist())
    place = {p: i + 1 for i, p in enumerate(kept)}
    return [pool[p]["token"] for p in kept], [0 if pool[p]["parent"] < 0 else place[pool[p]["parent"]] for p in kept]


@settings(max_examples=15, deadline=None)
@given(depth=st.integers(1, 4), width=st.integers(1, 5), share=st.floats(0.0, 1.0), seed=st.integers(0, 10**6), coarse=st.booleans())
def test_growth_and_selection_equal_the_oracle(depth, width, share, seed, coarse):
    pool_size = width + (depth - 1) * width**2
    tree = Tree(nodes=2 + int(share * (pool_size - 1)), depth=depth, width=width)
    draft = TableDraft(seed, coarse)
    codes = np.array([seed % 97, seed % 89 + 100], np.float32)

    def score(level, raw):
        return jnp.asarray(log_softmax(np.asarray(raw)))

    cache = empty_cache(1, 2, 1, 2, 4, jnp.float32)
    pool, _ = grow(draft, None, cache, jnp.asarray(draft.logits(codes)), jnp.asarray(codes)[:, None], tree, score)
    got = select(jnp.asarray([501, 502], jnp.int32), pool, tree)
    for b in range(2):
        tokens, parents = oracle(draft, codes[b], tree)
        assert got.tokens[b].tolist() == [501 + b, *tokens]
        assert got.parents[b].tolist() == [0, *parents]
        check_tree(np.asarray(got.parents[b]), np.asarray(got.depths[b]), np.asarray(got.mask[b]))


def check_tree(parents, depths, mask):
    """Parents precede children, depths count steps to the root, a row reads exactly its path."""
    for m in range(1, len(parents)):
        assert parents[m] < m and depths[m] == depths[parents[m]] + 1
        path, at = {m}, m
        while at:
            at = parents[at]
            path.add(at)
        assert set(np.flatnonzero(mask[m])) == path
    assert set(np.flatnonzero(mask[0])) == {0}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_ancestor_mask_of_any_tree(seeds):
    parents = np.array([0] + [s % (i + 1) for i, s in enumerate(seeds)], np.int32)
    mask = np.asarray(ancestor_mask(jnp.asarray(parents[None]), len(parents)))[0]
    for m in range(len(parents)):
        path, at = {m}, m
        while at:
            at = parents[at]
            path.add(int(at))
        assert set(np.flatnonzero(mask[m])) == path


def test_a_child_that_rounds_to_its_parents_score_never_outlives_it():
    # Children first in score order would be kept without their parents if ties went to the higher index.
    tree = Tree(nodes=3, depth=2, width=2)
    pool = Pool(
        tokens=jnp.arange(6, dtype=jnp.int32)[None],
        scores=jnp.asarray([[-1.0, -1.0, -1.0, -1.0, -1.0, -1.0]]),
        parents=jnp.asarray([[-1, -1, 0, 0, 1, 1]], jnp.int32),
    )
    got = select(jnp.asarray([9], jnp.int32), pool, tree)
    assert got.tokens.tolist() == [[9, 0, 1]] and got.parents.tolist() == [[0, 0, 0]]


def test_named_sizes():
    assert Tree.official(total_token=60, depth=7, top_k=10) == Tree(nodes=60, depth=8, width=10)
    assert Tree.sglang(num_steps=5, eagle_topk=8, num_draft_tokens=64) == Tree(nodes=64, depth=5, width=8)
    assert Chain(3).tree == Tree(nodes=4, depth=3, width=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(nodes=7, depth=1, width=5), "at most 6 nodes"),
        (dict(nodes=1, depth=1, width=1), "nodes >= 2"),
        (dict(nodes=2, depth=0, width=1), "depth >= 1"),
        (dict(nodes=2, depth=1, width=0), "width >= 1"),
        (dict(nodes=2.0, depth=1, width=1), "must be an int"),
        (dict(nodes=5, depth=3, width=1), "at most 4 nodes"),
    ],
)
def test_trees_that_cannot_exist(arguments, message):
    with pytest.raises(ValueError, match=message):
        Tree(**arguments)


@pytest.mark.parametrize("length", [0, -1, 1.5, True])
def test_chains_that_cannot_exist(length):
    with pytest.raises(ValueError, match="Chain length"):
        Chain(length)
