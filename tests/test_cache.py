"""The static cache: what an append writes, what it never reads, and that any way of filling it gives the state of one fresh prefill."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax import draft as draft_model
from eagle3_jax import target as target_model
from eagle3_jax.attention import causal_mask
from eagle3_jax.cache import Cache, append, empty_cache
from eagle3_jax.config import DraftConfig, RopeConfig, TargetConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import initialize
from eagle3_jax.target import Target

SLOTS = 24
PROMPT = np.array([5, 17, 3, 44, 21, 8, 60, 33, 2, 11], np.int32)
CONFIG = TargetConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=128,
    rope=RopeConfig(theta=1000.0),
)
TAPS = (0, 1)
forward = jax.jit(target_model.forward, static_argnames="taps")
draft_forward = jax.jit(draft_model.forward)
jitted_append = jax.jit(append)


@pytest.fixture(scope="module")
def target() -> Target:
    return jax.jit(lambda key: initialize(Target(CONFIG), key))(jax.random.key(0))


@pytest.fixture(scope="module")
def draft() -> Eagle3Draft:
    config = DraftConfig.for_target(CONFIG, draft_vocab_size=32, taps=TAPS, num_heads=2, num_kv_heads=1)
    return jax.jit(lambda key: initialize(Eagle3Draft(config), key))(jax.random.key(1))


def counts(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def target_pass(target: Target, tokens: np.ndarray, cache: Cache, mask: jax.Array | None = None, depths: np.ndarray | None = None):
    """One pass over tokens [B, T] behind the cache; depths: positions relative to the cache's length (default 0..T-1)."""
    T = tokens.shape[1]
    depths = np.arange(T) if depths is None else depths
    positions = cache.lengths[:, None] + jnp.asarray(depths, jnp.int32)[None]
    return forward(target, jnp.asarray(tokens, jnp.int32), positions, causal_mask(T) if mask is None else mask, cache, taps=TAPS)


def prefill(target: Target, tokens: np.ndarray, *pieces: int) -> tuple[Cache, np.ndarray, np.ndarray]:
    """Feeds one row of tokens in pieces; returns (cache, logits [T, V], features [T, A])."""
    cache, logits, features, start = target.new_cache(1, SLOTS), [], [], 0
    for piece in pieces:
        out = target_pass(target, tokens[None, start : start + piece], cache)
        cache = jitted_append(cache, out.kv, None, counts(piece))
        logits.append(target_model.logits(target, out.hidden)[0])
        features.append(out.features[0])
        start += piece
    return cache, np.concatenate(logits), np.concatenate(features)


def fresh_prefill(target: Target, tokens: np.ndarray) -> tuple[Cache, np.ndarray, np.ndarray]:
    """One pass over the row's tokens, always padded to the same width (one compilation): (cache, logits [T, V], features [T, A])."""
    T = len(tokens)
    out = target_pass(target, np.pad(tokens, (0, 16 - T), constant_values=1)[None], target.new_cache(1, SLOTS))
    cache = jitted_append(target.new_cache(1, SLOTS), out.kv, None, counts(T))
    return cache, np.asarray(target_model.logits(target, out.hidden)[0, :T]), np.asarray(out.features[0, :T])


def assert_same_cache(got: Cache, want: Cache, atol: float = 1e-5):
    """Equal lengths, equal valid slots."""
    np.testing.assert_array_equal(got.lengths, want.lengths)
    for i in range(len(want.k)):
        for row, length in enumerate(np.asarray(want.lengths)):
            np.testing.assert_allclose(got.k[i][row, :, :, :length], want.k[i][row, :, :, :length], atol=atol)
            np.testing.assert_allclose(got.v[i][row, :, :length], want.v[i][row, :, :length], atol=atol)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_append_against_a_list(data: st.DataObject):
    """A cache row is a list: an append extends it by the first `count` of the chosen rows, at the list's own end."""
    B, K, H, S, R, C = 3, 2, 4, 12, 5, 3
    seed = data.draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    cache = empty_cache(1, B, K, H, S, jnp.float32)
    rows_k: list[list[np.ndarray]] = [[] for _ in range(B)]
    rows_v: list[list[np.ndarray]] = [[] for _ in range(B)]
    for _ in range(data.draw(st.integers(1, 4))):
        k, v = (rng.normal(size=(B, R, K, H)).astype(np.float32) for _ in range(2))
        chosen = data.draw(st.lists(st.lists(st.integers(0, R - 1), min_size=C, max_size=C), min_size=B, max_size=B))
        room = [min(C, S - C - len(row)) for row in rows_k]
        count = [data.draw(st.integers(0, max(0, r))) for r in room]
        cache = jitted_append(cache, [(jnp.asarray(k), jnp.asarray(v))], jnp.asarray(chosen, jnp.int32), counts(*count))
        for b in range(B):
            rows_k[b] += [k[b, r] for r in chosen[b][: count[b]]]
            rows_v[b] += [v[b, r] for r in chosen[b][: count[b]]]
    np.testing.assert_array_equal(cache.lengths, [len(row) for row in rows_k])
    for b in range(B):
        for slot, (k_row, v_row) in enumerate(zip(rows_k[b], rows_v[b], strict=True)):
            np.testing.assert_array_equal(cache.k[0][b, :, :, slot], k_row)
            np.testing.assert_array_equal(cache.v[0][b, :, slot], v_row)


def test_append_fills_the_last_slot():
    """lengths + C == slots is allowed: nothing moves, nothing is lost."""
    cache = Cache((jnp.zeros((1, 1, 2, 5)),), (jnp.zeros((1, 1, 5, 2)),), counts(3))
    k = jnp.arange(1.0, 5.0).reshape(1, 2, 1, 2)
    cache = append(cache, [(k, k * 10)], None, counts(2))
    np.testing.assert_array_equal(cache.k[0][0, 0], [[0, 0, 0, 1, 3], [0, 0, 0, 2, 4]])
    np.testing.assert_array_equal(cache.v[0][0, 0], [[0, 0], [0, 0], [0, 0], [10, 20], [30, 40]])
    assert int(cache.lengths[0]) == 5


@pytest.mark.parametrize("pieces", [(4, 6), pytest.param((9, 1), marks=pytest.mark.slow)])
def test_target_prefill_in_pieces(target: Target, pieces: tuple[int, ...]):
    """10 = 4 + 6 = 9 + 1: the same cache, logits and features as one pass."""
    whole, logits, features = prefill(target, PROMPT, 10)
    parts, parts_logits, parts_features = prefill(target, PROMPT, *pieces)
    assert_same_cache(parts, whole)
    np.testing.assert_allclose(parts_logits, logits, atol=1e-5)
    np.testing.assert_allclose(parts_features, features, atol=1e-5)


@pytest.mark.parametrize("pieces", [(4, 6), pytest.param((9, 1), marks=pytest.mark.slow)])
def test_draft_prefill_in_pieces(target: Target, draft: Eagle3Draft, pieces: tuple[int, ...]):
    _, _, features = fresh_prefill(target, PROMPT)
    g = draft_model.fuse(draft, jnp.asarray(features)[None])
    tokens = jnp.asarray(np.roll(PROMPT, -1))[None]

    def feed(*pieces: int) -> tuple[Cache, np.ndarray]:
        cache, states, start = draft.new_cache(1, SLOTS), [], 0
        for piece in pieces:
            part = slice(start, start + piece)
            positions = cache.lengths[:, None] + jnp.arange(piece, dtype=jnp.int32)[None]
            a, kv = draft_forward(draft, target.embed[...], tokens[:, part], g[:, part], positions, causal_mask(piece), cache)
            cache = jitted_append(cache, [kv], None, counts(piece))
            states.append(a[0])
            start += piece
        return cache, np.concatenate(states)

    whole, states = feed(10)
    parts, parts_states = feed(*pieces)
    assert_same_cache(parts, whole)
    np.testing.assert_allclose(parts_states, states, atol=1e-5)


def test_ragged_rows_stand_alone(target: Target):
    """Prompts of 1, 7 and 10 tokens padded to 10 with any ids: each row's cache, and the pass after it, are what it gets alone."""
    lengths = [1, 7, 10]
    following = np.array([[9, 14], [50, 3], [27, 27]], np.int32)
    tokens = np.tile(PROMPT, (3, 1))
    tokens[0, 1:], tokens[1, 7:] = 63, -1
    cache = target.new_cache(3, SLOTS)
    cache = jitted_append(cache, target_pass(target, tokens, cache).kv, None, counts(*lengths))
    after = target_pass(target, following, cache)
    cache = jitted_append(cache, after.kv, None, counts(2, 2, 2))
    for row, length in enumerate(lengths):
        alone, _, features = fresh_prefill(target, np.concatenate([PROMPT[:length], following[row]]))
        own = Cache(tuple(k[row : row + 1] for k in cache.k), tuple(v[row : row + 1] for v in cache.v), cache.lengths[row : row + 1])
        assert_same_cache(own, alone)
        np.testing.assert_allclose(after.features[row], features[length:], atol=1e-5)


TREES = {
    "star": [-1, 0, 0, 0, 0, 0],
    "comb": [-1, 0, 0, 1, 1, 3],
    "two branches": [-1, 0, 0, 2, 1, 2],
}


def ancestry(parents: list[int]) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """(mask [M, M], depth [M], path from the root to each node) from a list of parents."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    mask = np.zeros((len(parents), len(parents)), bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    return mask, np.array([len(path) - 1 for path in paths]), paths


@pytest.mark.parametrize("name", TREES)
def test_each_tree_node_sees_its_own_path(target: Target, name: str):
    """Logits at a node equal a plain pass over prompt + path; one wrong bit in the mask would show the node another branch."""
    mask, depths, paths = ancestry(TREES[name])
    nodes = np.array([[7, 30, 12, 51, 30, 19]], np.int32)
    cache, _, _ = fresh_prefill(target, PROMPT)
    got = target_model.logits(target, target_pass(target, nodes, cache, jnp.asarray(mask)[None], depths).hidden)[0]
    for node, path in enumerate(paths):
        sequence = np.concatenate([PROMPT, nodes[0, path]])
        _, want, _ = fresh_prefill(target, sequence)
        np.testing.assert_allclose(got[node], want[-1], atol=1e-5)


def test_a_scattered_path_is_gathered(target: Target):
    """Nodes 0, 2, 5 of a tree are kept: the cache equals a fresh prefill of the committed tokens, and so does what follows."""
    mask, depths, paths = ancestry(TREES["two branches"])
    assert paths[5] == [0, 2, 5]
    nodes = np.array([[7, 30, 12, 51, 30, 19]], np.int32)
    cache, _, _ = fresh_prefill(target, PROMPT)
    out = target_pass(target, nodes, cache, jnp.asarray(mask)[None], depths)
    # The walk is padded to a fixed width: row 0 stands twice where nothing was accepted, and the count says so.
    cache = jitted_append(cache, out.kv, jnp.asarray([[0, 2, 5, 0]], jnp.int32), counts(3))
    committed = np.concatenate([PROMPT, nodes[0, [0, 2, 5]]])
    fresh, _, _ = fresh_prefill(target, committed)
    assert_same_cache(cache, fresh)
    following = np.array([[40, 41, 42, 43]], np.int32)
    want = target_pass(target, following, fresh)
    got = target_pass(target, following, cache)
    np.testing.assert_allclose(got.hidden, want.hidden, atol=1e-5)


def test_nothing_survives_beyond_the_count():
    """NaN in rows that are not kept: attention gives a masked slot the weight 0, and 0 * NaN would be NaN."""
    cache = empty_cache(1, 2, 1, 4, 8, jnp.float32)
    k = jnp.ones((2, 3, 1, 4)).at[0, 1:].set(jnp.nan).at[1, 0].set(jnp.inf)
    cache = jitted_append(cache, [(k, k)], None, counts(1, 0))
    assert np.all(np.isfinite(cache.k[0]))
    assert np.all(np.isfinite(cache.v[0]))
    np.testing.assert_array_equal(cache.v[0][:, 0, 0, 0], [1, 0])
