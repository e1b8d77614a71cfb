"""The ONE function that turns target logits into a distribution, and the noise that turns a distribution into a token.

Plain decoding, verification and the bonus token all call `choose`. The noise of a choice is keyed by (the row's seed, the
absolute position of the token being chosen) and nothing else, so a row samples the same tokens alone, in any slot of any
batch, and with any draft or none (coupled, or drafter-invariant, speculative decoding).
Nothing here sorts the vocabulary: thresholds are found by bisecting the bits of the float32 values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from eagle3_jax.native.build import UNIFORMS, available
from eagle3_jax.sharding import constrain, on_one_cpu


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Per-row settings.

    temperature: float32 [B], 0 is greedy; top_k: int32 [B], 0 is off; top_p: float32 [B], 1 is off;
    seeds: uint32 [B, 2], the high and low word of each row's seed.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seeds: jax.Array


def log_distribution(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """float32 log-probabilities [B, V] after temperature, then top-k, then top-p of the distribution renormalised after top-k.

    Removed tokens are -inf. Temperature 0 is all mass on the argmax. Ties keep the lowest id; the token that crosses
    top_p is kept, so a nucleus always holds at least one.
    """
    hot = (sampling.temperature > 0)[:, None]
    z = logits_BV.astype(jnp.float32) / jnp.where(hot, sampling.temperature[:, None], 1.0)
    limit_k = (sampling.top_k > 0) & (sampling.top_k < z.shape[-1])
    limit_p = sampling.top_p < 1.0
    z = jax.lax.cond(jnp.any(limit_k), lambda z: jnp.where(limit_k[:, None], keep_top_k(z, sampling.top_k), z), lambda z: z, z)
    z = jax.lax.cond(jnp.any(limit_p), lambda z: jnp.where(limit_p[:, None], keep_top_p(z, sampling.top_p), z), lambda z: z, z)
    ids = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    one_hot = jnp.where(ids == argmax(logits_BV)[:, None], 0.0, -jnp.inf)
    return jnp.where(hot, jax.nn.log_softmax(z, axis=-1), one_hot)


def choose(logits_BV: jax.Array, noise_BV: jax.Array | None, sampling: Sampling) -> jax.Array:
    """int32 [B]: argmax of log p + noise, a sample of p when the noise is Gumbel. `noise` None: every row is greedy."""
    if noise_BV is None:
        return argmax(logits_BV)
    return argmax(log_distribution(logits_BV, sampling) + noise_BV)


def argmax(x: jax.Array) -> jax.Array:
    """int32 index of the last axis's largest value, the lowest on ties: a max and a min, far faster than jnp.argmax on CPU."""
    peak = jnp.max(x, axis=-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.min(jnp.where(x == peak, ids, jnp.int32(x.shape[-1] - 1)), axis=-1)


def position_noise(seeds_B2: jax.Array, positions_BX: jax.Array, vocab_size: int, stream: int = 0) -> jax.Array:
    """G(seed, P): float32 Gumbel noise [B, ..., V] for positions int32 [B, ...], from threefry2x32, whatever generator the process
    defaults to.

    Stream 0 decides the token at a position; other streams are independent of it.
    """
    seeds_BX2 = jnp.broadcast_to(seeds_B2.reshape(-1, *(1,) * (positions_BX.ndim - 1), 2), (*positions_BX.shape, 2))
    uniforms_NV = _uniforms(_keys(seeds_BX2.reshape(-1, 2), positions_BX.reshape(-1), stream), vocab_size)
    noise = -jnp.log(-jnp.log(uniforms_NV))
    return constrain(noise.reshape(*positions_BX.shape, vocab_size), "rows", *(None,) * positions_BX.ndim)


def _uniforms(keys_N: jax.Array, count: int) -> jax.Array:
    """float32 in (0, 1), [N, count]. A custom call draws the same bits as JAX in an eighth of the time."""
    if on_one_cpu() and jax.threefry_partitionable.value and available():
        call = jax.ffi.ffi_call(UNIFORMS, jax.ShapeDtypeStruct((len(keys_N), count), jnp.float32), vmap_method="sequential")
        return call(jax.random.key_data(keys_N))
    smallest = jnp.finfo(jnp.float32).tiny
    return jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32, minval=smallest))(keys_N)


def position_uniforms(seeds_B2: jax.Array, positions_B: jax.Array, count: int, stream: int) -> jax.Array:
    """float32 uniforms in [0, 1), [B, count], independent of the noise of every other stream."""

    return jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32))(_keys(seeds_B2, positions_B, stream))


def keep_top_k(z_BV: jax.Array, k_B: jax.Array) -> jax.Array:
    """z with all but each row's k largest values set to -inf; ties keep the lowest ids. Rows with k outside 1..V-1 are to be ignored."""
    order = _order(z_BV)
    threshold = _largest_key(lambda key: jnp.sum(order >= key[:, None], axis=-1, dtype=jnp.int32) >= k_B, z_BV.shape[0])
    above = order > threshold[:, None]
    keep = above | _first_equal(order == threshold[:, None], k_B - jnp.sum(above, axis=-1, dtype=jnp.int32))
    return jnp.where(keep, z_BV, -jnp.inf)


def keep_top_p(z_BV: jax.Array, p_B: jax.Array) -> jax.Array:
    """z with everything outside the smallest set of largest probabilities that reaches p set to -inf; ties keep the lowest ids."""
    probs = jax.nn.softmax(z_BV, axis=-1)
    order = _order(z_BV)

    def mass(mask: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask, probs, 0.0), axis=-1)

    threshold = _largest_key(lambda key: mass(order >= key[:, None]) >= p_B, z_BV.shape[0])
    above, equal = order > threshold[:, None], order == threshold[:, None]
    each = jnp.max(jnp.where(equal, probs, 0.0), axis=-1)
    needed = jnp.ceil((p_B - mass(above)) / jnp.where(each > 0, each, 1.0))
    keep = above | _first_equal(equal, jnp.clip(needed, 1, z_BV.shape[-1]).astype(jnp.int32))
    return jnp.where(keep, z_BV, -jnp.inf)


def _keys(seeds_N2: jax.Array, positions_N: jax.Array, stream: int) -> jax.Array:
    """A key for each (seed, position, stream)."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return key if stream == 0 else jax.random.fold_in(key, stream)

    return jax.vmap(one)(seeds_N2, positions_N)


def _order(z: jax.Array) -> jax.Array:
    """uint32 keys that sort as the float32 values do (both zeros equal)."""
    bits = jax.lax.bitcast_convert_type(jnp.where(z == 0, 0.0, z), jnp.int32)
    flipped = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
    return jax.lax.bitcast_convert_type(flipped, jnp.uint32) ^ jnp.uint32(0x80000000)


def _largest_key(holds: Callable[[jax.Array], jax.Array], batch: int) -> jax.Array:
    """The largest uint32 [B] for which the downward-closed predicate `holds` (uint32 [B] -> bool [B]) is true; 0 if for none."""

    def step(i: jax.Array, key: jax.Array) -> jax.Array:
        candidate = key | (jnp.uint32(0x80000000) >> i.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, key)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros((batch,), jnp.uint32))


def _first_equal(equal_BV: jax.Array, count_B: jax.Array) -> jax.Array:
    """bool [B, V]: the `count` lowest ids at which `equal` is true."""
    ids = jax.lax.broadcasted_iota(jnp.int32, equal_BV.shape, 1)
    bits = (equal_BV.shape[-1]).bit_length()

    def step(i: jax.Array, cut: jax.Array) -> jax.Array:
        candidate = cut | (jnp.int32(1) << (bits - 1 - i))
        below = jnp.sum(equal_BV & (ids < candidate[:, None]), axis=-1, dtype=jnp.int32)
        return jnp.where(below < count_B, candidate, cut)

    cut = jax.lax.fori_loop(0, bits, step, jnp.zeros(count_B.shape, jnp.int32))
    return equal_BV & (ids <= cut[:, None]) & (count_B > 0)[:, None]
