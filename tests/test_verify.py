"""Verification rules: recorded decisions of the official code, and the law of the first and second token of every rule."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sampling import assert_law, oracle

from eagle3_jax.sampling import Sampling, position_noise, position_uniforms
from eagle3_jax.tree import DraftTree, ancestor_mask
from eagle3_jax.verify import accept_one, coupled, rejection, siblings, walk


def make_tree(tokens, parents, batch=1):
    parents = np.asarray(parents, np.int32)
    depths = np.zeros_like(parents)
    for m in range(1, len(parents)):
        depths[m] = depths[parents[m]] + 1

    def rows(x):
        return jnp.broadcast_to(jnp.asarray(x, jnp.int32), (batch, len(parents)))

    return DraftTree(rows(tokens), rows(parents), rows(depths), ancestor_mask(rows(parents), int(depths.max())))


def many(n, temperature=1.0, top_k=0, top_p=1.0):
    seeds = jnp.stack([jnp.zeros(n, jnp.uint32), jnp.arange(n, dtype=jnp.uint32)], axis=1)
    return Sampling(jnp.full(n, temperature), jnp.full(n, top_k, jnp.int32), jnp.full(n, top_p), seeds)


def noise_for(s, steps, V, start=10):
    at = jnp.full(s.seeds.shape[0], start)
    return jnp.stack([position_noise(s.seeds, at + i, V) for i in range(steps)], axis=1)


def uniforms_for(s, steps, width, start=10):
    at = jnp.full(s.seeds.shape[0], start)
    return jnp.stack([position_uniforms(s.seeds, at + i, width, stream=1) for i in range(steps)], axis=1)


# A star of three siblings, two of which have children of their own; token 4 is never drafted.
TOKENS, PARENTS = [9, 2, 0, 5, 1, 2], [0, 0, 0, 0, 1, 2]
LOGITS = np.array(
    [
        [1.0, 0.3, 0.8, -0.5, 0.9, 0.1],  # root
        [0.2, 1.4, 0.0, 0.6, -1.0, 0.3],  # after 2
        [0.5, 0.1, 1.0, 0.4, 0.2, -0.7],  # after 0
        [0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
        [2.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 2.0, 0.0, 0.0, 0.0, 0.0],
    ],
    np.float32,
)


def law_after(first):
    """The node whose logits give the second token, once the first one was accepted."""
    return {2: 1, 0: 2, 5: 3}.get(first)


@pytest.mark.parametrize("settings", [dict(), dict(temperature=0.7), dict(top_k=3), dict(temperature=1.3, top_p=0.7)])
@pytest.mark.parametrize("rule", ["coupled", "siblings"])
def test_tree_rules_leave_the_law_untouched(rule, settings):
    n = 50_000
    tree, s = make_tree(TOKENS, PARENTS, n), many(n, **settings)
    noise = noise_for(s, 3, 6)
    decide = coupled(tree, s, noise) if rule == "coupled" else siblings(tree, s, noise, uniforms_for(s, 3, 3))
    got = walk(tree, jnp.broadcast_to(jnp.asarray(LOGITS), (n, 6, 6)), decide, 3)
    tokens, count = np.asarray(got.tokens), np.asarray(got.count)
    law = (settings.get("temperature", 1.0), settings.get("top_k", 0), settings.get("top_p", 1.0))
    first = oracle(LOGITS[0], *law)
    assert_law(np.bincount(tokens[:, 0], minlength=6), first)
    for token in (2, 0, 5):
        reached = (tokens[:, 0] == token) & (count > 1)
        assert reached.sum() == (tokens[:, 0] == token).sum()  # a drafted first token is always walked through
        if reached.any():
            assert_law(np.bincount(tokens[reached, 1], minlength=6), oracle(LOGITS[law_after(token)], *law))
    assert (count[tokens[:, 0] == 4] == 1).all()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rejection_rule_leaves_the_law_untouched(temperature):
    """A chain of two, each token SAMPLED from q; q and p overlap badly on purpose, and q has mass where top-k left none in p."""
    n, V = 50_000, 6
    q = np.array([[0.5, 0.1, 0.1, 0.3, 0.0, 0.0], [0.05, 0.05, 0.6, 0.1, 0.1, 0.1]], np.float32)
    s = many(n, temperature, top_k=4)
    rng = np.random.default_rng(1)
    drafted = np.stack([rng.choice(V, n, p=row / row.sum()) for row in q], axis=1)
    tree = make_tree([9, 0, 0], [0, 0, 1], n)
    tree = DraftTree(jnp.concatenate([tree.tokens[:, :1], jnp.asarray(drafted, jnp.int32)], 1), tree.parents, tree.depths, tree.mask)
    rows = jnp.broadcast_to(jnp.asarray(LOGITS[[0, 1, 2]]), (n, 3, 6))
    # The second token's law depends on the first through nothing but the node, so one logits row per depth suffices.
    decide = rejection(tree, s, noise_for(s, 3, V), uniforms_for(s, 3, 1)[:, :, 0], jnp.broadcast_to(jnp.asarray(q), (n, 2, V)))
    got = walk(tree, rows, decide, 3)
    tokens, count = np.asarray(got.tokens), np.asarray(got.count)
    assert_law(np.bincount(tokens[:, 0], minlength=V), oracle(LOGITS[0], temperature, 4, 1.0))
    two = count > 1
    assert 0.2 < two.mean() < 0.9
    assert_law(np.bincount(tokens[two, 1], minlength=V), oracle(LOGITS[1], temperature, 4, 1.0))
    p = oracle(LOGITS[0], temperature, 4, 1.0)
    assert abs(two.mean() - np.minimum(p, q[0]).sum()) < 0.01  # accepts exactly 1 - TV(p, q)


def test_deterministic_candidates_under_min_1_p_over_q_would_be_wrong():
    """The reason for two rules: treating a top-1 candidate as if it were sampled from q changes the law."""
    n = 50_000
    p = oracle(LOGITS[0], 1.0, 0, 1.0)
    q = np.array([0.5, 0.1, 0.1, 0.3, 0.0, 0.0], np.float32)
    s = many(n)
    tree = make_tree([9, 0], [0, 0], n)
    decide = rejection(tree, s, noise_for(s, 2, 6), uniforms_for(s, 2, 1)[:, :, 0], jnp.broadcast_to(jnp.asarray(q), (n, 1, 6)))
    got = walk(tree, jnp.broadcast_to(jnp.asarray(LOGITS[:2]), (n, 2, 6)), decide, 2)
    counts = np.bincount(np.asarray(got.tokens)[:, 0], minlength=6)
    with pytest.raises(AssertionError):
        assert_law(counts, p)


def test_rejecting_everything_leaves_no_nan():
    """Siblings that hold all the mass: the last one must stand, whatever the uniforms say."""
    probs = jnp.asarray([[0.25, 0.75, 0.0]])
    stands, left = accept_one(probs, jnp.asarray([1]), jnp.asarray([0.999]))
    assert not stands[0]
    np.testing.assert_allclose(left, [[1.0, 0.0, 0.0]])
    stands, left = accept_one(left, jnp.asarray([0]), jnp.asarray([0.99999994]))
    assert stands[0] and np.isfinite(np.asarray(left)).all()


def test_p_equal_to_q_is_always_accepted():
    n, q = 2000, np.asarray(jax.nn.softmax(jnp.asarray(LOGITS[0])))
    s = many(n)
    drafted = np.random.default_rng(0).choice(6, n, p=q / q.sum())
    tree = make_tree([9, 0], [0, 0], n)
    tree = DraftTree(tree.tokens.at[:, 1].set(jnp.asarray(drafted, jnp.int32)), tree.parents, tree.depths, tree.mask)
    decide = rejection(tree, s, noise_for(s, 2, 6), uniforms_for(s, 2, 1)[:, :, 0], jnp.broadcast_to(jnp.asarray(q), (n, 1, 6)))
    got = walk(tree, jnp.broadcast_to(jnp.asarray(LOGITS[:2]), (n, 2, 6)), decide, 2)
    assert (np.asarray(got.count) == 2).mean() > 0.998  # rounding of p/q alone may refuse


def test_greedy_walk_of_mixed_rows():
    tree = make_tree([9, 3, 0, 1], [0, 0, 1, 2], 3)
    logits = np.full((3, 4, 6), -1.0, np.float32)
    logits[0, [0, 1, 2, 3], [3, 0, 1, 5]] = 1  # accepts all three, bonus 5
    logits[1, [0, 1], [3, 4]] = 1  # accepts 3, then the target says 4
    logits[2, 0, 2] = 1  # accepts nothing
    s = many(3, temperature=0.0)
    got = walk(tree, jnp.asarray(logits), coupled(tree, s, None), 4)
    assert got.count.tolist() == [4, 2, 1] and got.bad.tolist() == [-1, -1, -1]
    assert got.tokens.tolist() == [[3, 0, 1, 5], [3, 4, 0, 0], [2, 0, 0, 0]]
    assert got.path.tolist() == [[0, 1, 2, 3], [0, 1, 1, 1], [0, 0, 0, 0]]


def test_logits_that_are_not_finite_stop_the_row_and_no_other():
    tree = make_tree([9, 3, 0], [0, 0, 1], 2)
    logits = np.full((2, 3, 6), -1.0, np.float32)
    logits[:, [0, 1, 2], [3, 0, 5]] = 1
    logits[0, 1, 2] = np.nan
    got = walk(tree, jnp.asarray(logits), coupled(tree, many(2, temperature=0.0), None), 3)
    assert got.bad.tolist() == [1, -1] and got.count.tolist() == [2, 3]
    assert got.tokens[1].tolist() == [3, 0, 5] and got.tokens[0, 0] == 3


def test_recorded_decisions_of_the_official_code(golden):
    """Replays every recorded uniform: the same nodes accepted, the same distribution left for the next token."""
    data, accept = np.load(golden / "stochastic_accept.npz"), jax.jit(accept_one)
    cases = sorted({name[: -len("uniforms")] for name in data.files if name.endswith("_uniforms")})
    assert cases
    for case in cases:
        get = {
            k: data[case + k]
            for k in ("node_target_logits", "draft_tokens", "retrieve_indices", "uniforms", "used", "accept_length", "sample_p")
        }
        temperature = float(case.rsplit("_T", 1)[1].strip("_"))
        retrieve = get["retrieve_indices"]
        parents = np.zeros(len(get["draft_tokens"]), np.int32)
        for row in retrieve:
            for a, b in itertools.pairwise(row):
                if b >= 0:
                    parents[b] = a
        probs = np.stack([oracle(row, temperature, 0, 1.0) for row in get["node_target_logits"]]).astype(np.float32)
        trials = range(0, len(get["uniforms"]), 4)
        steps, width = retrieve.shape[1], int(np.bincount(parents[1:]).max())
        uniforms = np.zeros((len(trials), steps, width), np.float32)
        ends = []
        for row, trial in enumerate(trials):
            node, drawn, step, p = 0, 0, 0, probs[0][None]
            while True:
                for rank, child in enumerate(m for m in range(1, len(parents)) if parents[m] == node):
                    uniform = np.float32(get["uniforms"][trial, drawn])
                    uniforms[row, step, rank], drawn = uniform, drawn + 1
                    token = np.array([get["draft_tokens"][child]], np.int32)
                    stands, left = accept(p, token, np.array([uniform]))
                    if bool(stands[0]):
                        node, step, p = child, step + 1, probs[child][None]
                        break
                    p = left
                else:
                    break
            assert (step, drawn) == (int(get["accept_length"][trial]), int(get["used"][trial])), (case, trial)
            np.testing.assert_allclose(np.asarray(p)[0], get["sample_p"][trial], atol=2e-5)
            ends.append(node)
        # The same decisions by the rule the decoder runs, all trials as one batch.
        n = len(trials)
        tree, s = make_tree(get["draft_tokens"], parents, n), many(n, temperature)
        logits = jnp.broadcast_to(jnp.asarray(get["node_target_logits"]), (n, *get["node_target_logits"].shape))
        decide = siblings(tree, s, jnp.zeros((n, steps, logits.shape[-1])), jnp.asarray(uniforms))
        got = walk(tree, logits, decide, steps)
        assert (np.asarray(got.count) - 1).tolist() == [int(get["accept_length"][t]) for t in trials]
        assert [int(path[count - 1]) for path, count in zip(got.path, got.count, strict=True)] == ends
