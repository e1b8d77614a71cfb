"""Attention: one joint softmax over the cache and the pass's own tokens; the causal pass; the training-time-test step."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from eagle3_jax.flash import MASKED, Sight, flash
from eagle3_jax.layers import precision
from eagle3_jax.native.build import ATTEND

QUERIES = 128
"""Queries of one score tile."""

FEW = 64
"""Tokens of a pass up to which its own keys, taken one by one, are not what attention costs."""


def attend(
    q_BTNH: jax.Array,
    k_BRKH: jax.Array,
    v_BRKH: jax.Array,
    mask_BTR: jax.Array,
    cached: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    oldest_BT: jax.Array | None = None,
    *,
    native: bool = False,
) -> jax.Array:
    """Grouped-query attention of T queries over a cache prefix and R keys of the pass itself; returns [B, T, N, H].

    mask_BTR: bool, True where the query may read the key (leading axis 1 broadcasts over the batch).
    cached: (k [B, K, H, S], v [B, K, S, H], lengths int32 [B]); every query reads exactly the slots below its row's length,
    and none below its own `oldest` (int32 [B, T], the first slot of a sliding window).
    Scores and softmax are float32 whatever the dtype. Many queries over a cache go by blocks: score tiles stay small.
    native: a few queries over a cache may go to `native/attend.cc`, which is for models in panels (`panels.is_native`).
    """
    B, T, N, H = q_BTNH.shape
    if native and cached is not None and T <= FEW and q_BTNH.dtype == jnp.float32 and H % 4 == 0:
        operands = (q_BTNH, k_BRKH, v_BRKH, mask_BTR, *cached, *(() if oldest_BT is None else (oldest_BT,)))
        call = jax.ffi.ffi_call(ATTEND, jax.ShapeDtypeStruct(q_BTNH.shape, jnp.float32), vmap_method="sequential")
        return call(*operands)
    if cached is not None and T > QUERIES:
        starts = range(0, T, QUERIES)
        blocks = [[x[:, s : s + QUERIES] for x in (q_BTNH, mask_BTR, oldest_BT) if x is not None] for s in starts]
        return jnp.concatenate([attend(q, k_BRKH, v_BRKH, mask, cached, *oldest) for q, mask, *oldest in blocks], axis=1)
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
        slots = jnp.arange(k_cache.shape[-1], dtype=jnp.int32)[None, None, :]
        valid = slots < lengths[:, None, None]
        if oldest_BT is not None:
            valid = valid & (slots >= oldest_BT[:, :, None])
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


DENSE_LENGTH = 1024
"""Up to so many keys, the causal pass takes blocks of queries against all keys before them: nothing of it is kept for a backward pass."""

IMPLEMENTATIONS = ("xla", "cudnn", "tpu")
"""Of the causal pass: XLA everywhere; cuDNN's kernel on GPUs (bfloat16, rows that are not packed); JAX's Pallas kernel on TPUs."""


def attend_causal(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None = None,
    block: int = QUERIES,
    implementation: str = "xla",
    window: int | None = None,
) -> jax.Array:
    """As `attend` with `causal_mask`, never touching the keys behind a block of queries: half the work, memory linear in T.

    segments_BT: int32; a token reads those of its own segment, and none of segment -1. implementation: one of IMPLEMENTATIONS; a kernel
    that cannot take the call (type, packing, length, window) leaves it to XLA. window: how many tokens back each reads, itself included.
    """
    B, T = q_BTNH.shape[:2]
    if implementation == "cudnn" and window is None and segments_BT is None and q_BTNH.dtype != jnp.float32:
        return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation="cudnn")
    if implementation == "tpu" and window is None and T % 128 == 0:
        return _tpu_causal(q_BTNH, k_BTKH, v_BTKH, segments_BT)
    index = jnp.arange(T, dtype=jnp.int32)
    segments = jnp.zeros((B, T), jnp.int32) if segments_BT is None else segments_BT
    at = jnp.broadcast_to(index, (B, T))
    sight = Sight(at, segments, segments, None if window is None else at - (window - 1))
    if T > DENSE_LENGTH:
        return flash(q_BTNH, k_BTKH, v_BTKH, sight)[0].astype(q_BTNH.dtype)
    parts = []
    for start in range(0, T, block):
        stop = min(start + block, T)
        first = 0 if window is None else max(0, start - window + 1)
        mask = sight.mask(slice(start, stop), slice(first, stop))
        parts.append(attend(q_BTNH[:, start:stop], k_BTKH[:, first:stop], v_BTKH[:, first:stop], mask))
    return jnp.concatenate(parts, axis=1)


def _tpu_causal(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel

    repeats = q_BTNH.shape[2] // k_BTKH.shape[2]
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q_BTNH, jnp.repeat(k_BTKH, repeats, axis=2), jnp.repeat(v_BTKH, repeats, axis=2)))
    segments = None if segments_BT is None else kernel.SegmentIds(segments_BT, segments_BT)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out = kernel.flash_attention(q, k, v, segment_ids=segments, causal=True, sm_scale=q.shape[-1] ** -0.5)
    return out.transpose(0, 2, 1, 3)


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
    sight: Sight,
    later: Sequence[tuple[jax.Array, jax.Array]],
    block: int | None = None,
    seen: jax.Array | None = None,
) -> jax.Array:
    """Attention of a training-time-test step (paper, figure 6), its memory linear in the length; returns [B, C, N, H].

    One joint float32 softmax over the keys of step 0 in `sight` and one key per later step, which only its own slot reads:
    later: per step 1..s, (k, v) [B, C, K, H] of the same C slots as the queries. block: see `flash`.
    seen: int32, how many of `later` but its last count, the first ones; None: all.
    """
    return _merge(q_BCNH, *flash(q_BCNH, k0_BTKH, v0_BTKH, sight, block), later, seen)


def _merge(
    q_BCNH: jax.Array,
    out_BCNH: jax.Array,
    logsum_BCN: jax.Array,
    later: Sequence[tuple[jax.Array, jax.Array]],
    seen: jax.Array | None,
) -> jax.Array:
    """The softmax over the keys behind (out, logsum) and each slot's own later keys."""
    B, C, N, H = q_BCNH.shape
    exact = precision(q_BCNH.dtype)
    if later:
        K = later[0][0].shape[2]
        q = q_BCNH.reshape(B, C, K, N // K, H) * jnp.asarray(H**-0.5, q_BCNH.dtype)
        scores = [logsum_BCN.reshape(B, C, K, N // K)]
        scores += [jnp.einsum("BCKGH,BCKH->BCKG", q, k, precision=exact, preferred_element_type=jnp.float32) for k, _ in later]
        if seen is not None:
            scores[1:-1] = [jnp.where(i < seen, s, MASKED) for i, s in enumerate(scores[1:-1])]
        weights = jax.nn.softmax(jnp.stack(scores), axis=0)
        out_BCNH = weights[0].reshape(B, C, N, 1) * out_BCNH
        for weight, (_, v) in zip(weights[1:], later, strict=True):
            out_BCNH = out_BCNH + (weight[..., None] * v.astype(jnp.float32)[:, :, :, None]).reshape(B, C, N, H)
    return out_BCNH.astype(q_BCNH.dtype)
