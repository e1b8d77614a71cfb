"""The static key/value cache. It only ever receives tokens that were kept; drafted tokens live beside it until then.

K is stored [B, K, H, S] and V [B, K, S, H]: the layouts in which XLA's batched products read them without a transpose.
One pair of arrays per block, so that a `lax.while_loop` can update each in place. On a mesh every device holds its own rows and kv heads.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from eagle3_jax.sharding import constrain, local

BlockKV = tuple[jax.Array, jax.Array]
"""K and V of one block for the tokens of one pass, each [B, R, K, H], K already rotated."""

Blocks = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """k: per block [B, K, H, S]; v: per block [B, K, S, H]; lengths: int32 [B], the valid slots of each row (slots 0..length-1)."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    lengths: jax.Array

    @property
    def slots(self) -> int:
        return self.k[0].shape[-1]


def empty_cache(num_layers: int, batch: int, num_kv_heads: int, head_dim: int, slots: int, dtype: jnp.dtype) -> Cache:
    """A cache with no valid slot."""
    return Cache(
        k=tuple(constrain(jnp.zeros((batch, num_kv_heads, head_dim, slots), dtype), *_AXES) for _ in range(num_layers)),
        v=tuple(constrain(jnp.zeros((batch, num_kv_heads, slots, head_dim), dtype), *_AXES) for _ in range(num_layers)),
        lengths=jnp.zeros((batch,), jnp.int32),
    )


def resized(cache: Cache, slots: int) -> Cache:
    """The same contents in `slots` slots; fewer than there are is a ValueError."""
    more = slots - cache.slots
    if more < 0:
        raise ValueError(f"a cache of {cache.slots} slots does not fit into {slots}")
    return Cache(
        k=tuple(jnp.pad(k, ((0, 0), (0, 0), (0, 0), (0, more))) for k in cache.k),
        v=tuple(jnp.pad(v, ((0, 0), (0, 0), (0, more), (0, 0))) for v in cache.v),
        lengths=cache.lengths,
    )


def append(cache: Cache, new: list[BlockKV], rows_BC: jax.Array | None, count_B: jax.Array) -> Cache:
    """Writes rows `rows_BC` (None: all rows in order) of the pass's K/V behind each row's valid slots; `count_B` of them become valid.

    C slots are written whatever the count: those beyond it become zeros (a NaN there would survive its zero weight in the
    attention), are never read, and are overwritten by the next append. A count that comes out of the pass's own logits, or of
    `after`, also orders this write behind every read of the old cache: without that, XLA copies the whole cache first.
    The caller guarantees lengths + C <= slots: XLA would clamp the start and overwrite kept rows without a word.
    """
    C = new[0][0].shape[1] if rows_BC is None else rows_BC.shape[1]
    counted = (jnp.arange(C, dtype=jnp.int32)[None] < count_B[:, None])[:, :, None, None]
    ks, vs = [], []
    for k_cache, v_cache, (k, v) in zip(cache.k, cache.v, new, strict=True):
        if rows_BC is not None:
            k = jnp.take_along_axis(k, rows_BC[:, :, None, None], axis=1)
            v = jnp.take_along_axis(v, rows_BC[:, :, None, None], axis=1)
        k, v = jnp.where(counted, k, 0), jnp.where(counted, v, 0)
        ks.append(k.astype(k_cache.dtype).transpose(0, 2, 3, 1))
        vs.append(v.astype(v_cache.dtype).transpose(0, 2, 1, 3))
    write = local(_write_all, (_AXES, _AXES, _AXES, _AXES, ("rows",)), _AXES)
    new_k, new_v = write(cache.k, cache.v, tuple(ks), tuple(vs), cache.lengths)
    return Cache(new_k, new_v, cache.lengths + count_B)


def after(count_B: jax.Array, states_BD: jax.Array) -> jax.Array:
    """The counts, never negative ones, as if they came out of the pass's states [B, ..., D]: XLA sees a difference where there is none."""
    peak_B = jnp.max(states_BD, axis=tuple(range(1, states_BD.ndim)))
    return jnp.where(jnp.isnan(peak_B), jnp.maximum(count_B, 0), count_B)


_AXES = ("rows", "kv_heads", None, None)

UNROLLED_ROWS = 16
"""Up to this many rows, one slice update each (XLA does them in place, fastest); beyond, one scatter, whose program does not grow."""


def _write_all(ks: Blocks, vs: Blocks, new_ks: Blocks, new_vs: Blocks, starts_B: jax.Array) -> tuple[Blocks, Blocks]:
    """The caches of all blocks with the new slots written."""
    return (
        tuple(_write(k, new, starts_B, axis=2) for k, new in zip(ks, new_ks, strict=True)),
        tuple(_write(v, new, starts_B, axis=1) for v, new in zip(vs, new_vs, strict=True)),
    )


def _write(buffer: jax.Array, values: jax.Array, starts_B: jax.Array, axis: int) -> jax.Array:
    """buffer[b, ..., starts[b]:starts[b]+C, ...] = values[b], `axis` counted without the batch."""
    zero = jnp.zeros((), starts_B.dtype)
    if buffer.shape[0] > UNROLLED_ROWS:

        def one(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(row, new, [start if i == axis else zero for i in range(row.ndim)])

        return jax.vmap(one)(buffer, values, starts_B)
    for b in range(buffer.shape[0]):
        starts = [jnp.full_like(zero, b)] + [zero] * (buffer.ndim - 1)
        starts[axis + 1] = starts_B[b]
        buffer = jax.lax.dynamic_update_slice(buffer, values[b : b + 1], starts)
    return buffer
