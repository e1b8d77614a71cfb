"""Attention in memory linear in the length against masks written out in full."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import attention
from eagle3_jax.attention import attend, attend_causal, ttt_attend
from eagle3_jax.flash import Sight, flash

B, C, T, N, K, H = 2, 29, 37, 4, 2, 8


def case(steps: int, queries: int = C, seed: int = 0) -> tuple[jax.Array, ...]:
    """(q, k0, v0, later k [steps, ...], later v, a direction to project the result on)."""
    keys = jax.random.split(jax.random.key(seed), 6)
    own = (B, queries, K, H)
    shapes = ((B, queries, N, H), (B, T, K, H), (B, T, K, H), (steps, *own), (steps, *own), (B, queries, N, H))
    return tuple(jax.random.normal(key, shape) * (2 if i == 0 else 1) for i, (key, shape) in enumerate(zip(keys, shapes, strict=True)))


def packed() -> Sight:
    """Two rows of three documents and padding; the queries are some of the keys, ascending, with missing ones in front."""
    rng = np.random.default_rng(0)
    segments = np.stack([np.repeat([1, 2, 3, 0], [12, 5, 15, 5]), np.repeat([1, 2, 3, 0], [1, 20, 14, 2])]).astype(np.int32)
    at = np.zeros((B, C), np.int32)
    for b in range(B):
        chosen = np.sort(rng.choice(np.flatnonzero(segments[b] > 0), C - 4, replace=False))
        at[b, 4:] = chosen
    return Sight(jnp.asarray(at), jnp.asarray(np.take_along_axis(segments, at, 1)), jnp.asarray(np.where(segments > 0, segments, -1)))


def differentiate(function: Any, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(the result, the gradient of its projection by every operand but the direction)."""
    *inputs, direction = operands

    def loss(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = function(*inputs)
        return jnp.sum(out * direction), out

    grads, out = jax.jit(jax.grad(loss, argnums=tuple(range(len(inputs))), has_aux=True))(*inputs)
    return out, grads


def step(sight: Sight, q: jax.Array, k0: jax.Array, v0: jax.Array, ks: jax.Array, vs: jax.Array) -> jax.Array:
    return ttt_attend(q, k0, v0, sight, list(zip(ks, vs, strict=True)), block=16)


def figure_6(sight: Sight, q: jax.Array, k0: jax.Array, v0: jax.Array, ks: jax.Array, vs: jax.Array) -> jax.Array:
    """One mask over [keys of step 0, C keys of step 1, C of step 2, ...]: what the slot reads of step 0, then diagonals."""
    mask = sight.mask(slice(0, q.shape[1]), slice(0, T))
    diagonal = jnp.broadcast_to(jnp.eye(q.shape[1], dtype=bool), (B, q.shape[1], q.shape[1]))
    return attend(
        q,
        jnp.concatenate([k0, *ks], axis=1),
        jnp.concatenate([v0, *vs], axis=1),
        jnp.concatenate([mask, *[diagonal] * len(ks)], axis=2),
    )


def assert_close(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_equal_to_the_mask_of_figure_6() -> None:
    sight, steps = packed(), 2
    assert_close(differentiate(partial(step, sight), case(steps)), differentiate(partial(figure_6, sight), case(steps)))


@pytest.mark.parametrize("block", [5, 64])
def test_blocks_of_any_size(block: int) -> None:
    sight = packed()
    q, k0, v0, *_ = case(0)
    out, logsum = jax.jit(partial(flash, block=block))(q, k0, v0, sight)
    mask = sight.mask(slice(0, C), slice(0, T))
    seen = np.asarray(mask.any(-1))
    np.testing.assert_allclose(np.asarray(out)[seen], np.asarray(jax.jit(attend)(q, k0, v0, mask))[seen], atol=1e-5)
    scores = jnp.einsum("bcngh,btnh->bcngt", q.reshape(B, C, K, N // K, H), k0) * H**-0.5
    want = jax.nn.logsumexp(jnp.where(mask[:, :, None, None], scores, -jnp.inf), axis=-1).reshape(B, C, N)
    np.testing.assert_allclose(np.asarray(logsum)[seen], np.asarray(want)[seen], atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_all_keys_before_a_block_at_once(window: int | None) -> None:
    """What a CPU does with rows of moderate length, against the loop over pairs of blocks: both results and their gradients."""
    queries, keys = 150, 170
    a = jax.random.split(jax.random.key(1), 5)
    q, direction = (jax.random.normal(key, (B, queries, N, H)) for key in a[:2])
    k, v = (jax.random.normal(key, (B, keys, K, H)) for key in a[2:4])
    other = jax.random.normal(a[4], (B, queries, N))
    segments = jnp.asarray(np.stack([np.repeat([1, 2, -1], [90, 60, 20]), np.repeat([1, 2], [130, 40])]), jnp.int32)
    at = jnp.asarray(np.broadcast_to(np.arange(queries) + 10, (B, queries)), jnp.int32)
    query_segment = jnp.take_along_axis(segments, at, axis=1).at[:, :3].set(7)  # which is no key's
    sight = Sight(at, query_segment, segments, None if window is None else at - (window - 1))

    def loss(block: int | None, *operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, logsum = flash(*operands, sight, block)
        return jnp.sum(out * direction) + jnp.sum(jnp.where(logsum > -1e20, logsum * other, 0.0)), (out, logsum)

    one, two = (jax.jit(jax.grad(partial(loss, block), argnums=(0, 1, 2), has_aux=True))(q, k, v) for block in (None, 32))
    assert_close(one, two)
    assert np.all(np.asarray(one[1][0])[:, :3] == 0)


def test_a_query_that_sees_nothing_is_zero_and_has_finite_gradients() -> None:
    blind = packed()._replace(key_segment=jnp.full((B, T), -1, jnp.int32))
    assert_close(jax.jit(partial(flash, block=8))(*case(0)[:3], blind)[0], jnp.zeros((B, C, N, H)), 0)
    for steps in (0, 2):
        out, grads = differentiate(partial(step, blind), case(steps))
        assert all(np.all(np.isfinite(x)) for x in (out, *grads))
        assert all(np.all(np.asarray(g) == 0) for g in grads[1:3])


def test_garbage_out_of_sight_changes_nothing() -> None:
    sight = packed()
    operands = case(1)
    unseen = (sight.key_segment < 0)[:, :, None, None]
    loud = (operands[0], *(jnp.where(unseen, 1e4, x) for x in operands[1:3]), *operands[3:])
    one, other = (differentiate(partial(step, sight), x) for x in (operands, loud))
    assert_close(one[0], other[0], 0)
    assert_close(one[1][0], other[1][0], 0)


@pytest.mark.parametrize("segmented", [False, True])
def test_causal_pass_linear_and_dense(segmented: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, *_ = case(0, queries=T)
    segments = packed().key_segment if segmented else None
    rows = segments if segments is not None else jnp.zeros((B, T), jnp.int32)
    mask = jnp.tril(jnp.ones((T, T), bool))[None] & (rows[:, :, None] == rows[:, None]) & (rows >= 0)[:, None]
    seen = np.asarray(mask.any(-1))
    want = np.asarray(jax.jit(attend)(q, k, v, mask))[seen]
    dense = jax.jit(partial(attend_causal, block=16))(q, k, v, segments)
    np.testing.assert_allclose(np.asarray(dense)[seen], want, atol=1e-5)
    monkeypatch.setattr(attention, "DENSE_LENGTH", 0)
    linear = jax.jit(partial(attend_causal, block=15))(q, k, v, segments)
    np.testing.assert_allclose(np.asarray(linear)[seen], want, atol=1e-5)


def test_the_kernel_for_tpus_by_interpretation() -> None:
    from jax.experimental.pallas import tpu as pltpu

    length = 128
    q, k, v = (jax.random.normal(jax.random.key(i), (1, length, heads, 128)) for i, heads in enumerate((2, 1, 1)))
    segments = jnp.asarray(np.repeat([1, 2], [50, 78])[None], jnp.int32)
    with pltpu.force_tpu_interpret_mode():
        out = attend_causal(q, k, v, segments, implementation="tpu")
    np.testing.assert_allclose(out, jax.jit(attend_causal)(q, k, v, segments), atol=2e-5)


def test_temporaries_at_most_double_with_the_length() -> None:
    def temporaries(length: int) -> int:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array, later: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
            index = jnp.arange(length, dtype=jnp.int32)[None]
            return jnp.sum(ttt_attend(q, k, v, Sight(index, jnp.ones_like(index), jnp.ones_like(index)), later))

        q, k = (jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (4, 2))
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(q, k, k, [(k, k)]).compile().memory_analysis().temp_size_in_bytes

    sizes = [temporaries(length) for length in (2048, 4096)]
    assert sizes[1] <= 2 * sizes[0]


def test_bfloat16_products_keep_float32_sums() -> None:
    sight = packed()
    operands = case(1)
    one = jax.jit(step)
    out = one(sight, *(x.astype(jnp.bfloat16) for x in operands[:5]))
    assert out.dtype == jnp.bfloat16
    want = one(sight, *(x.astype(jnp.bfloat16).astype(jnp.float32) for x in operands[:5]))
    np.testing.assert_allclose(out.astype(jnp.float32), want, rtol=2e-2, atol=2e-2)
