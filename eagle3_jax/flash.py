"""Exact attention in memory linear in the length: blocks of keys under a running maximum, nothing of the size queries x keys kept.

The backward pass recomputes each block's weights from the logarithm of the softmax's sum. Source: FlashAttention-2 (arXiv:2307.08691).
Both passes are one scan over the (query block, key block) pairs that causality leaves, so that a program's products can be counted.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.layers import precision
from eagle3_jax.sharding import platform

MASKED = -1e30
"""Score of a masked key: finite, so that a fully masked row has finite gradients."""

PREFIX = 1024
"""Up to so many keys a block of queries takes all keys before it at once on a CPU, where a loop's body copies what it reads and writes."""


class Sight(NamedTuple):
    """Which keys a query reads, without a mask of all pairs: those at or before its own place, of its own segment.

    at: int32 [B, C], each query's index among the keys. query_segment: int32 [B, C]. key_segment: int32 [B, T], -1: never read.
    oldest: int32 [B, C], the first index that each query reads in a sliding window, or None.
    Query c must stand at most at c + T - C, so that a block of queries need not touch the keys behind it.
    """

    at: jax.Array
    query_segment: jax.Array
    key_segment: jax.Array
    oldest: jax.Array | None = None

    def mask(self, queries: slice, keys: slice) -> jax.Array:
        """bool [B, c, t] of a block."""
        index = jnp.arange(keys.start, keys.stop, dtype=jnp.int32)
        oldest = None if self.oldest is None else self.oldest[:, queries]
        return _readable(self.at[:, queries], self.query_segment[:, queries], index, self.key_segment[:, keys], oldest)


def flash(q_BCNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, sight: Sight, block: int | None = None) -> tuple[jax.Array, jax.Array]:
    """(softmax(q k / sqrt(H)) v over the keys in sight, float32 [B, C, N, H]; the logarithm of its sum, float32 [B, C, N]).

    Softmax and sums are float32, products take the inputs' type. A query that sees no key gets zeros and the logarithm -1e30.
    Both results are differentiable, so that further keys can be merged in; temporaries are linear in C and T.
    block: queries and keys of one block; None: as suits the backend (a CPU's caches want 128: 512 took 2.5 times as long; and up to
    PREFIX keys a block of queries takes all it may read at once).
    """
    B, C, N, H = q_BCNH.shape
    T, K = k_BTKH.shape[1:3]
    G = N // K
    at_once = block is None and platform() == "cpu" and T <= PREFIX
    if block is None:
        block = 128 if platform() == "cpu" else 512
    rows, keys = min(block, C), T if at_once else min(block, T)
    more_rows, more_keys = -C % rows, -T % keys

    def cut(x: jax.Array, size: int, more: int, fill: int = 0) -> jax.Array:
        """[B, length, ...] -> [blocks, B, size, ...]."""
        x = jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        return jnp.moveaxis(x.reshape(B, -1, size, *x.shape[2:]), 1, 0)

    q = cut(q_BCNH * jnp.asarray(H**-0.5, q_BCNH.dtype), rows, more_rows)
    q = q.reshape(*q.shape[:3], K, G, H).transpose(0, 1, 3, 4, 2, 5).reshape(-1, B, K, G * rows, H)
    k, v = (cut(x, keys, more_keys).swapaxes(2, 3) for x in (k_BTKH, v_BTKH))
    at, query_segment, key_segment = (jnp.broadcast_to(x, (B, x.shape[1])) for x in sight[:3])
    oldest = None if sight.oldest is None else cut(jnp.broadcast_to(sight.oldest, (B, C)), rows, more_rows)
    sight = Sight(cut(at, rows, more_rows, -1), cut(query_segment, rows, more_rows, -2), cut(key_segment, keys, more_keys, -1), oldest)
    reach = [min(min((i + 1) * rows, C) + T - C, T) for i in range(len(q))]
    # custom_vjp hides the types.
    if at_once:
        out, logsum = _prefixes(G, tuple(reach), q, k[0], v[0], sight)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        pairs = np.asarray([(i, j) for i, stop in enumerate(reach) for j in range(-(-stop // keys))], np.int32)
        out, logsum = _flash(G, q, k, v, sight, jnp.asarray(pairs))  # pyright: ignore[reportGeneralTypeIssues]

    def whole(x: jax.Array) -> jax.Array:
        """[blocks, B, K, G * rows, ...] -> [B, C, N, ...]."""
        x = jnp.moveaxis(x.reshape(-1, B, K, G, rows, *x.shape[4:]), (0, 4), (1, 2))
        return x.reshape(B, -1, N, *x.shape[5:])[:, :C]

    return whole(out), whole(logsum)


def _readable(at: jax.Array, query_segment: jax.Array, index: jax.Array, key_segment: jax.Array, oldest: jax.Array | None) -> jax.Array:
    """bool [B, c, t]."""
    seen = (at[:, :, None] >= index[None, None]) & (query_segment[:, :, None] == key_segment[:, None])
    return seen if oldest is None else seen & (oldest[:, :, None] <= index[None, None])


def _block_scores(group: int, q_BKXH: jax.Array, k_BKtH: jax.Array, sight: Sight, i: Any, j: Any) -> jax.Array:
    """Scores float32 [B, K, X, t] of query block i against the first t keys of key block j, MASKED where they do not count."""
    s = jnp.einsum("BKXH,BKtH->BKXt", q_BKXH, k_BKtH, precision=precision(q_BKXH.dtype), preferred_element_type=jnp.float32)
    B, K, _, t = s.shape
    segment = sight.key_segment[j]
    index = j * segment.shape[1] + jnp.arange(t, dtype=jnp.int32)
    oldest = None if sight.oldest is None else sight.oldest[i]
    mask = _readable(sight.at[i], sight.query_segment[i], index, segment[:, :t], oldest)
    return jnp.where(mask[:, None, None], s.reshape(B, K, group, -1, t), MASKED).reshape(s.shape)


def _gradients(weight: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, shared: jax.Array) -> tuple[jax.Array, ...]:
    """What a query block and the keys it was weighed against add to the gradients of q, k and v, each float32."""
    d_s = weight * (_product("BKXH,BKtH->BKXt", d_out, v) + shared[..., None])
    d_v = _product("BKXt,BKXH->BKtH", weight, d_out.astype(v.dtype))
    return _product("BKXt,BKtH->BKXH", d_s, k), _product("BKXt,BKXH->BKtH", d_s, q), d_v


def _product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of weights in float32 with a block, in the block's type, summed in float32."""
    return jnp.einsum(form, a.astype(b.dtype), b, precision=precision(b.dtype), preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(group, q, k, v, sight, pairs):
    return _flash_forward(group, q, k, v, sight, pairs)[0]


def _flash_forward(group, q, k, v, sight, pairs):
    def step(carry, pair):
        out, peak, total = carry
        i, j = pair
        s = _block_scores(group, q[i], k[j], sight, i, j)
        old = peak[i]
        new = jnp.maximum(old, jnp.max(s, axis=-1))
        weight = jnp.where(s > MASKED, jnp.exp(s - new[..., None]), 0.0)
        keep = jnp.exp(old - new)
        fresh = out[i] * keep[..., None] + _product("BKXt,BKtH->BKXH", weight, v[j])
        return (out.at[i].set(fresh), peak.at[i].set(new), total.at[i].set(total[i] * keep + jnp.sum(weight, axis=-1))), None

    start = (jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], MASKED, jnp.float32), jnp.zeros(q.shape[:-1], jnp.float32))
    (out, peak, total), _ = jax.lax.scan(step, start, (pairs[:, 0], pairs[:, 1]))
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out, logsum = out / total[..., None], jnp.where(seen, peak + jnp.log(total), MASKED)
    return (out, logsum), (q, k, v, sight, pairs, out, logsum)


def _flash_backward(group, saved, cotangent):
    q, k, v, sight, pairs, out, logsum = saved
    d_out, d_logsum = cotangent
    # What every score's gradient of a row has in common.
    shared = d_logsum - jnp.sum(d_out * out, axis=-1)

    def step(carry, pair):
        d_q, d_k, d_v = carry
        i, j = pair
        s = _block_scores(group, q[i], k[j], sight, i, j)
        weight = jnp.where(s > MASKED, jnp.exp(s - logsum[i][..., None]), 0.0)
        more_q, more_k, more_v = _gradients(weight, q[i], k[j], v[j], d_out[i], shared[i])
        return (d_q.at[i].add(more_q), d_k.at[j].add(more_k), d_v.at[j].add(more_v)), None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    (d_q, d_k, d_v), _ = jax.lax.scan(step, start, (pairs[:, 0], pairs[:, 1]))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


_flash.defvjp(_flash_forward, _flash_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _prefixes(group, reach, q, k, v, sight):
    """As `_flash` of one key block, of which query block i takes the first reach[i] keys."""
    return _prefixes_forward(group, reach, q, k, v, sight)[0]


def _prefixes_forward(group, reach, q, k, v, sight):
    outs, logsums = [], []
    for i, stop in enumerate(reach):
        s = _block_scores(group, q[i], k[:, :, :stop], sight, i, 0)
        peak = jnp.maximum(jnp.max(s, axis=-1), MASKED / 2)
        weight = jnp.exp(s - peak[..., None])
        total = jnp.sum(weight, axis=-1)
        seen = total > 0
        total = jnp.where(seen, total, 1.0)
        outs.append(_product("BKXt,BKtH->BKXH", weight, v[:, :, :stop]) / total[..., None])
        logsums.append(jnp.where(seen, peak + jnp.log(total), MASKED))
    out, logsum = jnp.stack(outs), jnp.stack(logsums)
    return (out, logsum), (q, k, v, sight, out, logsum)


def _prefixes_backward(group, reach, saved, cotangent):
    q, k, v, sight, out, logsum = saved
    d_out, d_logsum = cotangent
    shared = d_logsum - jnp.sum(d_out * out, axis=-1)
    d_qs, d_k, d_v = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for i, stop in enumerate(reach):
        s = _block_scores(group, q[i], k[:, :, :stop], sight, i, 0)
        weight = jnp.exp(s - jnp.where(logsum[i] > MASKED, logsum[i], 0.0)[..., None])
        d_q, more_k, more_v = _gradients(weight, q[i], k[:, :, :stop], v[:, :, :stop], d_out[i], shared[i])
        d_qs.append(d_q)
        d_k, d_v = d_k.at[:, :, :stop].add(more_k), d_v.at[:, :, :stop].add(more_v)
    return jnp.stack(d_qs).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_prefixes.defvjp(_prefixes_forward, _prefixes_backward)
