"""Attention's custom call against XLA's attention; and its bits, which nothing changes but what a query reads, in which order."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.attention import attend
from eagle3_jax.native.build import panel_width

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

CHUNK = 256
"""Places of a row that one thread takes."""


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Attention is called here without the model that would ask for the custom calls."""
    panel_width()


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def native(q, k, v, mask, cache, oldest=None):
    return np.asarray(attend(*map(jnp.asarray, (q, k, v, mask)), tuple(map(jnp.asarray, cache)), oldest, native=True))


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 9),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    width=st.sampled_from([4, 8, 12, 64, 80, 96]),
    slots=st.integers(1, 600),
    window=st.booleans(),
    one_mask=st.booleans(),
)
def test_attention_is_xlas(seed, batch, tokens, group, kv_heads, width, slots, window, one_mask):
    """Over any lengths, masks and windows; what a query does not see may be anything."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, slots + 1, batch).astype(np.int32)
    mask = rng.random((1 if one_mask else batch, tokens, tokens + 2)) < 0.4
    mask[..., -1] = True
    oldest = rng.integers(-3, slots + 1, (batch, tokens)).astype(np.int32) if window else None
    shapes = [(batch, tokens, kv_heads * group, width), *[(batch, tokens + 2, kv_heads, width)] * 2]
    q, k, v = (rng.standard_normal(shape).astype(np.float32) * 3 for shape in shapes)
    k_cache, v_cache = (rng.standard_normal((batch, kv_heads, *s)).astype(np.float32) for s in ((width, slots), (slots, width)))
    want = attend(*map(jnp.asarray, (q, k, v, mask)), tuple(map(jnp.asarray, (k_cache, v_cache, lengths))), oldest)
    k[:, -2], v[:, -2], mask[..., -2] = np.nan, np.nan, False
    unseen = attend(*map(jnp.asarray, (q, k, v, mask)), tuple(map(jnp.asarray, (k_cache, v_cache, lengths))), oldest)
    for row, length in enumerate(lengths):
        k_cache[row, :, :, length:], v_cache[row, :, length:] = np.nan, np.nan
    got = attend(*map(jnp.asarray, (q, k, v, mask)), tuple(map(jnp.asarray, (k_cache, v_cache, lengths))), oldest, native=True)
    assert want.shape == got.shape and np.isfinite(got).all()
    np.testing.assert_allclose(got, unseen, atol=2e-5, rtol=2e-5)


def test_attention_passes_on_what_is_not_finite():
    """To exactly the queries that read it."""
    q, k, v = (jnp.asarray(random(1, 3, heads, 8, seed=heads)) for heads in (4, 2, 2))
    mask = jnp.asarray([[[True, False, False], [False, True, False], [True, False, True]]])
    cache = jnp.zeros((1, 2, 8, 4)), jnp.zeros((1, 2, 4, 8)), jnp.asarray([2], jnp.int32)
    for bad in ((k.at[0, 0].set(jnp.nan), v), (k, v.at[0, 0].set(jnp.nan)), (k, v.at[0, 0].set(jnp.inf))):
        got = attend(q, *bad, mask, cache, native=True)
        assert np.array_equal(np.isfinite(got).all((0, 2, 3)), [False, True, False])


def test_attention_stays_in_its_slots():
    """Whatever the lengths say. A slot that is not finite, behind the window of some queries of a pass, reaches the others alone."""
    tokens, slots = 6, 40
    q, k, v = (jnp.asarray(random(3, tokens, heads, 16, seed=heads)) for heads in (4, 2, 2))
    mask = jnp.tril(jnp.ones((1, tokens, tokens), bool))
    k_cache, v_cache = random(3, 2, 16, slots, seed=5), random(3, 2, slots, 16, seed=6)
    oldest = jnp.tile(jnp.arange(10, 10 + tokens, dtype=jnp.int32), (3, 1))
    cache = k_cache.copy(), v_cache.copy(), jnp.asarray([slots + 9, -(10**6), 33], jnp.int32)
    cache[0][:, :, :, 12], cache[1][:, :, 12] = np.nan, np.nan
    got = np.array(attend(q, k, v, mask, (jnp.asarray(cache[0]), jnp.asarray(cache[1]), cache[2]), oldest, native=True))
    want = attend(q, k, v, mask, (jnp.asarray(k_cache), jnp.asarray(v_cache), cache[2]), oldest)
    sees = np.array([0, 2])[:, None], np.arange(3)
    assert np.isnan(got[sees]).all()
    got[sees] = np.asarray(want)[sees]
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("width", [12, 64])
@pytest.mark.parametrize(
    ("length", "window"), [(0, None), (37, None), (37, 40), (CHUNK - 3, None), (CHUNK, 40), (3 * CHUNK - 2, None), (3 * CHUNK - 2, 300)]
)
def test_a_query_has_the_same_bits_in_every_pass(length, width, window):
    """A tree's node beside the others, in a batch, over a cache with room, and alone, with its ancestors in the cache, as plain decoding
    comes to it."""
    parents, heads, kv_heads = [-1, 0, 0, 1, 2, 3, 5, 6, 6], 6, 2
    nodes, slots = len(parents), length + 100
    paths = [[0]]
    for node in range(1, nodes):
        paths.append([*paths[parents[node]], node])
    mask = np.zeros((1, nodes, nodes), bool)
    for node, path in enumerate(paths):
        mask[0, node, path] = True
    q = random(2, nodes, heads, width) * 3
    k, v = random(2, nodes, kv_heads, width, seed=1), random(2, nodes, kv_heads, width, seed=2)
    k_cache, v_cache = random(2, kv_heads, width, slots, seed=3), random(2, kv_heads, slots, width, seed=4)
    lengths = np.asarray([length // 2, length], np.int32)
    k_cache[1, :, :, length:], v_cache[1, :, length:] = np.nan, np.nan
    positions = length + np.asarray([len(path) - 1 for path in paths])
    oldest = None if window is None else np.tile(np.maximum(positions - window + 1, 0).astype(np.int32), (2, 1))
    together = native(q, k, v, mask, (k_cache, v_cache, lengths), oldest)[1]
    assert np.isfinite(together).all()
    for node, path in enumerate(paths):
        before, at = path[:-1], [node]
        cached = length + len(before)
        size = cached + 3 * node % 20
        keys, values = np.full((1, kv_heads, width, size), np.nan, np.float32), np.full((1, kv_heads, size, width), np.nan, np.float32)
        keys[0, :, :, :length], values[0, :, :length] = k_cache[1, :, :, :length], v_cache[1, :, :length]
        keys[0, :, :, length:cached], values[0, :, length:cached] = k[1, before].transpose(1, 2, 0), v[1, before].transpose(1, 0, 2)
        cache = keys, values, np.asarray([cached], np.int32)
        old = None if oldest is None else oldest[:1, at]
        alone = native(q[1:, at], k[1:, at], v[1:, at], np.ones((1, 1, 1), bool), cache, old)
        np.testing.assert_array_equal(alone[0, 0], together[node])


def test_many_queries_and_rows():
    """More than one thread takes of them, and as many as there are: the bits of each alone."""
    tokens, length = 60, CHUNK + 9
    q, k, v = (random(3, tokens, heads, 16, seed=heads) for heads in (3, 1, 2))
    v, mask = v[:, :, :1], np.tril(np.ones((1, tokens, tokens), bool))
    cache = random(3, 1, 16, 300, seed=5), random(3, 1, 300, 16, seed=6), np.asarray([length, 0, 3], np.int32)
    together = native(q, k, v, mask, cache)
    for row in range(3):
        for many in (1, 2, 7, 17, 40):
            some = native(q[row:][:1, :many], k[row:][:1, :many], v[row:][:1, :many], mask[:, :many, :many], [x[row:][:1] for x in cache])
            np.testing.assert_array_equal(some[0], together[row, :many])
