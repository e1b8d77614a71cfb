"""Attention: one joint softmax over the cache and the pass's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from eagle3_jax.layers import precision

MASKED = -1e30
"""Score of a masked key: finite, so that a fully masked row has finite gradients."""


def attend(
    q_BTNH: jax.Array,
    k_BRKH: jax.Array,
    v_BRKH: jax.Array,
    mask_BTR: jax.Array,
    cached: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Grouped-query attention of T queries over a cache prefix and R keys of the pass itself; returns [B, T, N, H].

    mask_BTR: bool, True where the query may read the key (leading axis 1 broadcasts over the batch).
    cached: (k [B, K, H, S], v [B, K, S, H], lengths int32 [B]); every query reads exactly the slots below its row's length.
    Scores and softmax are float32 whatever the dtype.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BRKH.shape[2]
    group = N // K
    exact = precision(q_BTNH.dtype)
    # Query heads of one group share a kv head: fold (group, T) into one axis, so that each kv head is one product.
    q = q_BTNH.reshape(B, T, K, group, H).transpose(0, 2, 3, 1, 4).reshape(B, K, group * T, H)
    q = q * jnp.asarray(H**-0.5, q.dtype)

    # A key that is not finite must reach exactly the queries that read it: its scores become NaN, its value is taken out of the
    # product, where a weight of zero would not stop it.
    sound_BRK = jnp.all(jnp.isfinite(v_BRKH), axis=-1)
    v_BRKH = jnp.where(sound_BRK[..., None], v_BRKH, 0)
    flaw = jnp.where(sound_BRK.transpose(0, 2, 1)[:, :, None], 0.0, jnp.nan)

    def scores(product: jax.Array, mask: jax.Array) -> jax.Array:
        s = product.reshape(B, K, group, T, -1)
        return jnp.where(mask[:, None, None], s, MASKED)

    own = scores(jnp.einsum("BKXH,BRKH->BKXR", q, k_BRKH, precision=exact, preferred_element_type=jnp.float32) + flaw, mask_BTR)
    peak = jnp.max(own, axis=-1, keepdims=True)
    old = v_cache = None
    if cached is not None:
        k_cache, v_cache, lengths = cached
        valid = jnp.arange(k_cache.shape[-1], dtype=jnp.int32)[None, None, :] < lengths[:, None, None]
        old = scores(jnp.einsum("BKXH,BKHS->BKXS", q, k_cache, precision=exact, preferred_element_type=jnp.float32), valid)
        peak = jnp.maximum(peak, jnp.max(old, axis=-1, keepdims=True))
    own = jnp.exp(own - peak)
    total = jnp.sum(own, axis=-1, keepdims=True)
    out = jnp.einsum("BKXR,BRKH->BKXH", _flat(own).astype(v_BRKH.dtype), v_BRKH, precision=exact)
    if old is not None and v_cache is not None:
        old = jnp.exp(old - peak)
        total = total + jnp.sum(old, axis=-1, keepdims=True)
        out = out + jnp.einsum("BKXS,BKSH->BKXH", _flat(old).astype(v_cache.dtype), v_cache, precision=exact)
    out = out / _flat(total).astype(out.dtype)
    return out.reshape(B, K, group, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def attend_causal(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, block: int = 128) -> jax.Array:
    """As `attend` with `causal_mask`, by blocks of queries that never touch the keys behind them: half the work, small score tiles."""
    T = q_BTNH.shape[1]
    parts = []
    for start in range(0, T, block):
        stop = min(start + block, T)
        mask = jnp.arange(stop, dtype=jnp.int32)[None, :] <= jnp.arange(start, stop, dtype=jnp.int32)[:, None]
        parts.append(attend(q_BTNH[:, start:stop], k_BTKH[:, :stop], v_BTKH[:, :stop], mask[None]))
    return jnp.concatenate(parts, axis=1)


def causal_mask(length: int) -> jax.Array:
    """bool [1, T, T]: token t reads tokens 0..t."""
    return jnp.tril(jnp.ones((length, length), bool))[None]


def _flat(x_BKGTR: jax.Array) -> jax.Array:
    B, K, G, T, R = x_BKGTR.shape
    return x_BKGTR.reshape(B, K, G * T, R)


def ttt_attend(
    q_BCNH: jax.Array,
    k0_BTKH: jax.Array,
    v0_BTKH: jax.Array,
    mask_BCT: jax.Array,
    later: Sequence[tuple[jax.Array, jax.Array]],
    block: int = 128,
) -> jax.Array:
    """Attention of a training-time-test step; returns [B, C, N, H].

    One joint float32 softmax over the keys of step 0 that `mask` admits and one key per later step, which only its own slot reads:
    later: per step 1..s, (k, v) [B, C, K, H] of the same C slots as the queries.
    Query c must stand at a position of at most c + T - C, so that a block of queries need not touch the keys behind it.
    """
    C, T = q_BCNH.shape[1], k0_BTKH.shape[1]
    parts = []
    for start in range(0, C, block):
        stop = min(start + block, C)
        keys = stop + T - C
        diagonal = [(k[:, start:stop], v[:, start:stop]) for k, v in later]
        parts.append(_ttt_block(q_BCNH[:, start:stop], k0_BTKH[:, :keys], v0_BTKH[:, :keys], mask_BCT[:, start:stop, :keys], diagonal))
    return jnp.concatenate(parts, axis=1)


def _ttt_block(
    q_BCNH: jax.Array, k0_BTKH: jax.Array, v0_BTKH: jax.Array, mask_BCT: jax.Array, later: Sequence[tuple[jax.Array, jax.Array]]
) -> jax.Array:
    B, C, N, H = q_BCNH.shape
    K = k0_BTKH.shape[2]
    exact = precision(q_BCNH.dtype)
    q = q_BCNH.reshape(B, C, K, N // K, H) * jnp.asarray(H**-0.5, q_BCNH.dtype)
    own = jnp.einsum("BCKGH,BTKH->BKGCT", q, k0_BTKH, precision=exact, preferred_element_type=jnp.float32)
    own = jnp.where(mask_BCT[:, None, None], own, MASKED)
    peak = jnp.max(own, axis=-1)
    diagonal = []
    for k, _ in later:
        diagonal.append(jnp.einsum("BCKGH,BCKH->BKGC", q, k, precision=exact, preferred_element_type=jnp.float32))
        peak = jnp.maximum(peak, diagonal[-1])
    peak = jax.lax.stop_gradient(peak)
    own = jnp.exp(own - peak[..., None])
    total = jnp.sum(own, axis=-1)
    out = jnp.einsum("BKGCT,BTKH->BKGCH", own.astype(v0_BTKH.dtype), v0_BTKH, precision=exact, preferred_element_type=jnp.float32)
    for score, (_, v) in zip(diagonal, later, strict=True):
        weight = jnp.exp(score - peak)
        total = total + weight
        out = out + weight[..., None] * v.astype(jnp.float32).transpose(0, 2, 1, 3)[:, :, None]
    out = (out / total[..., None]).astype(q_BCNH.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, C, N, H)
