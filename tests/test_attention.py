"""Attention against a numpy oracle that walks over rows, heads and queries one at a time."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax import attention
from eagle3_jax.attention import causal_mask
from eagle3_jax.flash import Sight, flash

attend = jax.jit(attention.attend)


def oracle(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    cached: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Query head n reads kv head n // (N / K); float64; the cache's k is [B, K, H, S] and its v [B, K, S, H]."""
    B, T, N, H = q.shape
    K = k.shape[2]
    out = np.zeros((B, T, N, H))
    for b in range(B):
        for t in range(T):
            own = mask[b if mask.shape[0] > 1 else 0, t]
            for n in range(N):
                head = n // (N // K)
                keys, values = k[b, own, head], v[b, own, head]
                if cached is not None:
                    length = cached[2][b]
                    keys = np.concatenate([cached[0][b, head, :, :length].T, keys])
                    values = np.concatenate([cached[1][b, head, :length], values])
                scores = keys.astype(np.float64) @ q[b, t, n].astype(np.float64) / np.sqrt(H)
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ values / weights.sum()
    return out


def random_case(seed: int, B: int, T: int, R: int, N: int, K: int, H: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, H), (B, R, K, H), (B, R, K, H))
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return q * 3, k, v


def random_cache(seed: int, B: int, K: int, H: int, S: int, lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed + 1)
    k, v = rng.normal(size=(B, K, H, S)).astype(np.float32), rng.normal(size=(B, K, S, H)).astype(np.float32)
    return k, v, np.asarray(lengths, np.int32)


@pytest.mark.parametrize("K", [1, 2, 3, 6])
def test_grouped_heads(K: int):
    q, k, v = random_case(0, B=2, T=5, R=5, N=6, K=K, H=4)
    mask = np.asarray(causal_mask(5))
    np.testing.assert_allclose(attend(q, k, v, jnp.asarray(mask)), oracle(q, k, v, mask), atol=2e-6)


def test_cache_and_own_keys_share_one_softmax():
    q, k, v = random_case(1, B=3, T=4, R=4, N=4, K=2, H=8)
    cached = random_cache(1, B=3, K=2, H=8, S=16, lengths=[0, 5, 16])
    mask = np.asarray(causal_mask(4))
    np.testing.assert_allclose(attend(q, k, v, jnp.asarray(mask), cached), oracle(q, k, v, mask, cached), atol=2e-6)


def test_many_queries_over_a_cache_go_by_blocks():
    """More than two tiles of queries, each with its own mask and window: what each gets alone."""
    T, many = 2 * attention.QUERIES + 10, np.array([0, attention.QUERIES - 1, attention.QUERIES, 2 * attention.QUERIES + 9])
    q, k, v = random_case(6, B=2, T=T, R=T, N=2, K=1, H=4)
    cached = random_cache(6, B=2, K=1, H=4, S=16, lengths=[7, 16])
    mask, oldest = causal_mask(T), jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32) // 40, (2, T))
    got = attend(q, k, v, mask, cached, oldest)
    np.testing.assert_allclose(got[:, many], attend(q[:, many], k, v, mask[:, many], cached, oldest[:, many]), atol=2e-6)


def test_more_keys_than_queries():
    """Drafted keys of earlier levels stand before the pass's own."""
    q, k, v = random_case(2, B=2, T=3, R=8, N=4, K=2, H=8)
    mask = np.random.default_rng(2).random((2, 3, 8)) < 0.5
    mask[..., 0] = True
    np.testing.assert_allclose(attend(q, k, v, jnp.asarray(mask)), oracle(q, k, v, mask), atol=2e-6)


def test_slots_beyond_the_length_are_not_read():
    """Finite junk of any size there changes no bit; nor does the size of the cache, beyond rounding."""
    q, k, v = random_case(3, B=2, T=2, R=2, N=4, K=2, H=8)
    k_cache, v_cache, lengths = random_cache(3, B=2, K=2, H=8, S=16, lengths=[5, 9])
    mask = causal_mask(2)
    clean = attend(q, k, v, mask, (k_cache, v_cache, lengths))
    k_junk, v_junk = k_cache.copy(), v_cache.copy()
    for b, length in enumerate(lengths):
        k_junk[b, :, :, length:] = np.nan if b else 1e30
        v_junk[b, :, length:] = 1e30
    np.testing.assert_array_equal(attend(q, k, v, mask, (k_junk, v_junk, lengths)), clean)
    np.testing.assert_allclose(attend(q, k, v, mask, (k_cache[..., :9], v_cache[:, :, :9], lengths)), clean, atol=2e-6)


def test_masked_keys_are_not_read():
    q, k, v = random_case(4, B=1, T=3, R=5, N=2, K=1, H=4)
    mask = np.array([[[1, 0, 0, 0, 1], [1, 1, 0, 0, 0], [0, 1, 0, 0, 1]]], bool)
    clean = attend(q, k, v, jnp.asarray(mask))
    k[:, 2:4], v[:, 2:4] = 1e20, -1e20
    np.testing.assert_array_equal(attend(q, k, v, jnp.asarray(mask)), clean)


def test_large_scores_do_not_overflow():
    q, k, v = random_case(5, B=1, T=2, R=2, N=2, K=2, H=4)
    cached = random_cache(5, B=1, K=2, H=4, S=4, lengths=[3])
    mask = np.asarray(causal_mask(2))
    got = attend(q * 1e4, k, v, jnp.asarray(mask), cached)
    np.testing.assert_allclose(got, oracle(q * 1e4, k, v, mask, cached), atol=1e-5)


def test_a_fully_masked_row_has_finite_gradients():
    q, k, v = random_case(6, B=1, T=3, R=3, N=2, K=1, H=4)
    mask = jnp.asarray(np.array([[[1, 0, 0], [0, 0, 0], [1, 0, 1]]], bool))
    gradients = jax.jit(jax.grad(lambda *x: jnp.sum(jnp.square(attend(*x, mask))), argnums=(0, 1, 2)))(q, k, v)
    for gradient in gradients:
        assert np.all(np.isfinite(gradient))
    assert np.any(gradients[0][0, 0] != 0) or np.any(gradients[0][0, 2] != 0)


def test_scores_are_float32_in_bfloat16():
    """Two keys score 20 and 20.0625, which bfloat16 cannot tell apart: a rounded score would give the mean of the values, 0."""
    q = jnp.asarray([8.0, 8.0, 1.0, 1.0], jnp.bfloat16).reshape(1, 1, 1, 4)
    k = jnp.asarray([[4.0, 1.0, 0.0, 0.0], [4.0, 1.0, 0.125, 0.0]], jnp.bfloat16).reshape(1, 2, 1, 4)
    v = jnp.asarray([[-1.0], [1.0]], jnp.bfloat16).repeat(4, axis=-1).reshape(1, 2, 1, 4)
    want = np.tanh(0.0625 / 2)
    got = attend(q, k, v, jnp.ones((1, 1, 2), bool))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-3)
    cached = (k[:, 1:].transpose(0, 2, 3, 1), v[:, 1:].transpose(0, 2, 1, 3), jnp.asarray([1], jnp.int32))
    got = attend(q, k[:, :1], v[:, :1], jnp.ones((1, 1, 1), bool), cached)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-3)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_mask(data: st.DataObject):
    """Random sizes from a few (each is one compilation), random masks and lengths; every row reads something."""
    group, K, T = data.draw(st.sampled_from([(1, 2, 3), (3, 1, 4), (2, 2, 1)]))
    B, H, S = 2, 4, 8
    seed = data.draw(st.integers(0, 2**16))
    q, k, v = random_case(seed, B, T, T + 2, group * K, K, H)
    lengths = data.draw(st.lists(st.integers(0, S), min_size=B, max_size=B))
    bits = data.draw(st.lists(st.booleans(), min_size=B * T * (T + 2), max_size=B * T * (T + 2)))
    mask = np.asarray(bits).reshape(B, T, T + 2)
    mask[:, np.arange(T), np.arange(T) + 2] = True
    cached = random_cache(seed, B, K, H, S, lengths)
    got = attend(q, k, v, mask, cached)
    np.testing.assert_allclose(got, oracle(q, k, v, mask, cached), atol=1e-5)


@pytest.mark.parametrize("dense", [64, 8])
def test_a_causal_pass_with_a_window(dense: int, monkeypatch: pytest.MonkeyPatch):
    """In blocks against all their keys, and in memory linear in the length; packed, so that a window ends at its segment's start too."""
    q, k, v = random_case(3, B=2, T=40, R=40, N=4, K=2, H=4)
    segments = np.repeat([[1, 2, -1]], [25, 12, 3], axis=1).repeat(2, axis=0).astype(np.int32)
    distance = np.arange(40)[:, None] - np.arange(40)[None]
    mask = (distance >= 0) & (distance < 7) & (segments[:, :, None] == segments[:, None])
    monkeypatch.setattr(attention, "DENSE_LENGTH", dense)
    got = jax.jit(partial(attention.attend_causal, block=16, window=7))(q, k, v, segments)
    np.testing.assert_allclose(got, oracle(q, k, v, mask), atol=2e-6)
    at = jnp.arange(40, dtype=jnp.int32)[None]
    sight = Sight(at, jnp.asarray(segments), jnp.asarray(segments), at - 6)
    np.testing.assert_allclose(jax.jit(partial(flash, block=16))(q, k, v, sight)[0], oracle(q, k, v, mask), atol=2e-6)


def test_a_window_over_the_cache():
    """Each query reads the slots from its own oldest one on."""
    q, k, v = random_case(4, B=2, T=3, R=3, N=4, K=2, H=4)
    cached = random_cache(4, B=2, K=2, H=4, S=12, lengths=[9, 5])
    oldest = np.array([[2, 3, 4], [0, 1, 7]], np.int32)
    got = attend(q, k, v, causal_mask(3), (*map(jnp.asarray, cached),), jnp.asarray(oldest))
    for b in range(2):
        for t in range(3):
            first = oldest[b, t]
            rest = (cached[0][b : b + 1, :, :, first:], cached[1][b : b + 1, :, first:], np.maximum(cached[2][b : b + 1] - first, 0))
            want = oracle(q[b : b + 1, t : t + 1], k[b : b + 1], v[b : b + 1], np.asarray(causal_mask(3))[:, t : t + 1], rest)
            np.testing.assert_allclose(got[b : b + 1, t : t + 1], want, atol=2e-6)
