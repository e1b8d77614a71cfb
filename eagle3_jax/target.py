"""The frozen target, LLaMA or one of its relatives (`families`): (tokens, cache) -> hidden states, tapped features, the pass's own K/V."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax import bfloat
from eagle3_jax.attention import attend, attend_causal
from eagle3_jax.cache import BlockKV, Cache, empty_cache
from eagle3_jax.config import TargetConfig
from eagle3_jax.fused import gated_linear, linear_onto, norm_linear
from eagle3_jax.layers import linear, precision, rms_norm, rotary, rotate
from eagle3_jax.panels import is_native
from eagle3_jax.params import param
from eagle3_jax.sharding import constrain, gathered, lookup, on_one_cpu


class TargetBlock(nnx.Module):
    """One decoder block's parameters. Weights are [in, ..., out], the transpose of the checkpoint's.

    Products that read the same input are one product: a pass of few tokens costs what its weights cost to read, and fewer,
    larger reads are faster (SmolLM2, one token, 2-core CPU: 15.5 ms against 19). qkv is laid out by kv head, its G query heads
    first, then k, then v, so that it shards over kv heads without a shuffle.
    """

    def __init__(self, config: TargetConfig):
        D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
        K, slots = config.num_kv_heads, config.num_heads // config.num_kv_heads + 2
        self.attention_norm = param((D,), ("norm",), "ones")
        self.qkv = param((D, K, slots, H), ("embed", "kv_heads", None, None))
        self.o = param((config.num_heads * H, D), ("heads", "embed"))
        self.mlp_norm = param((D,), ("norm",), "ones")
        self.gate_up = param((D, 2, F), ("embed", None, "mlp"))
        self.down = param((F, D), ("mlp", "embed"))
        if config.qk_norm:
            self.q_norm = param((H,), ("norm",), "ones")
            self.k_norm = param((H,), ("norm",), "ones")
        if config.qkv_bias:
            self.qkv_bias = param((K, slots, H), ("kv_heads", None, None), "zeros")
        if config.o_bias:
            self.o_bias = param((D,), ("norm",), "zeros")
        if config.mlp_bias:
            self.gate_up_bias = param((2, F), (None, "mlp"), "zeros")
            self.down_bias = param((D,), ("norm",), "zeros")


class Target(nnx.Module):
    """Parameters of the frozen target: embed [V, D], blocks, final norm [D], head [D, V] (absent when tied to embed)."""

    def __init__(self, config: TargetConfig):
        self.config = config
        self.embed = param((config.vocab_size, config.hidden_size), ("vocab", "embed"))
        self.blocks = nnx.List([TargetBlock(config) for _ in range(config.num_layers)])
        self.norm = param((config.hidden_size,), ("norm",), "ones")
        if not config.tie_embeddings:
            self.head = param((config.hidden_size, config.vocab_size), ("embed", "vocab"))

    @property
    def dtype(self) -> jnp.dtype:
        """The compute and cache type."""
        return self.embed.dtype

    def new_cache(self, batch: int, slots: int) -> Cache:
        """An empty cache of `slots` tokens for each of `batch` rows."""
        c = self.config
        return empty_cache(c.num_layers, batch, c.num_kv_heads, c.head_dim, slots, self.dtype)


class TargetOutput(NamedTuple):
    """hidden [B, T, D] after the final norm; features [B, T, A], taps concatenated low to high, not normed; kv of the T tokens."""

    hidden: jax.Array
    features: jax.Array
    kv: list[BlockKV]


def forward(
    target: Target,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    mask_BTT: jax.Array | None,
    cache: Cache | None = None,
    taps: tuple[int, ...] = (),
    earlier: list[BlockKV] | None = None,
    segments_BT: jax.Array | None = None,
    attention: str = "xla",
    prompt_B: jax.Array | None = None,
) -> TargetOutput:
    """One pass over T tokens that read the cache's valid slots and, by mask, each other. Nothing is written.

    tokens, positions: int32; mask: bool [B or 1, T, T], True where the row's query may read the column's key;
    None: plain causal attention over these tokens alone, without a cache; with segments, int32 [B, T], a token reads its own only,
    and those of segment -1 are never read. attention: the implementation of that causal pass.
    Sliding windows are no business of the mask: a block that has one narrows it by the positions, to which cache slots are equal.
    taps: entering-block ids; tap k is Hugging Face's `hidden_states[k]`, so that L is the final normed state.
    earlier: per block, K/V of tokens that stand between cache and pass, as the `kv` of an earlier pass gives them: passes of T tokens,
    each one position on; then the mask is [B or 1, T, R] over theirs and the pass's own keys, and the `kv` returned holds both.
    prompt_B: int32 [B], each row's prompt length ([B, T] where a row holds several prompts), for `dynamic` rotary embedding: tokens of the
    prompt are rotated for a context of that length, later ones (and all without it) for the context that each of them ends, so that
    nothing depends on what else is in the pass.
    """
    c = target.config
    if mask_BTT is None and cache is not None:
        raise ValueError("a pass over a cache needs a mask")
    x = lookup(target.embed[...], tokens_BT)
    B, T, _ = x.shape
    # A pass over whole texts has more tokens than weights have rows: the weights travel.
    blocks = gathered(target, "blocks.").blocks if mask_BTT is None else target.blocks
    context_BT = None
    if prompt_B is not None and c.rope.kind == "dynamic":
        context_BT = jnp.maximum(positions_BT + 1, prompt_B if prompt_B.ndim == 2 else prompt_B[:, None])
    cos_sin = rotary(positions_BT, c.rope, c.head_dim, context_BT)
    # A window that reaches as far as this pass can costs nothing.
    reach = T if cache is None else cache.slots
    windows = [w if w is not None and w < reach else None for w in c.windows] or [None] * c.num_layers
    passes = 0 if earlier is None else earlier[0][0].shape[1] // T
    narrowed = {w: _narrow(mask_BTT, positions_BT, passes, w) for w in set(windows)} if mask_BTT is not None else {}
    features: dict[int, jax.Array] = {}
    kv: list[BlockKV] = []
    for i, block in enumerate(blocks):
        if i in taps:
            features[i] = x
        qkv = norm_linear(x, block.attention_norm[...], c.rms_norm_eps, *_weights(block, "qkv"))
        q, k, v = qkv[..., :-2, :].reshape(B, T, c.num_heads, c.head_dim), qkv[..., -2, :], qkv[..., -1, :]
        if c.qk_norm:
            q, k = rms_norm(q, block.q_norm[...], c.rms_norm_eps), rms_norm(k, block.k_norm[...], c.rms_norm_eps)
        q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        if earlier is not None:
            k, v = jnp.concatenate([earlier[i][0], k], axis=1), jnp.concatenate([earlier[i][1], v], axis=1)
        kv.append((k, v))
        if mask_BTT is None:
            attended = attend_causal(q, k, v, segments_BT, implementation=attention, window=windows[i])
        else:
            cached = None if cache is None else (cache.k[i], cache.v[i], cache.lengths)
            mask, oldest = narrowed[windows[i]]
            attended = attend(q, k, v, mask, cached, oldest, native=is_native(block.qkv[...]))
        x = linear_onto(x, attended.reshape(B, T, -1), *_weights(block, "o"))
        gate_up = norm_linear(x, block.mlp_norm[...], c.rms_norm_eps, *_weights(block, "gate_up"))
        x = gated_linear(gate_up, *_weights(block, "down"), add=x)
    hidden = rms_norm(x, target.norm[...], c.rms_norm_eps)
    features[c.num_layers] = hidden
    tapped = jnp.concatenate([features[k] for k in taps], axis=-1) if taps else jnp.zeros((B, T, 0), x.dtype)
    return TargetOutput(hidden, tapped, kv)


def output_head(target: Target) -> jax.Array:
    """[D, V]."""
    return target.embed[...].T if target.config.tie_embeddings else target.head[...]


def _narrow(mask_BTR: jax.Array, positions_BT: jax.Array, passes: int, window: int | None) -> tuple[jax.Array, jax.Array | None]:
    """The pass's mask and the oldest position [B, T] that each query may read in the cache, both as the window leaves them.

    passes: how many earlier passes, each one position on, the mask's keys begin with.
    """
    if window is None:
        return mask_BTR, None
    oldest = positions_BT - (window - 1)
    keys = jnp.concatenate([positions_BT - back for back in range(passes, -1, -1)], axis=1)
    return mask_BTR & (keys[:, None, :] >= oldest[:, :, None]), oldest


def logits(target: Target, hidden: jax.Array, head: jax.Array | None = None) -> jax.Array:
    """float32 [..., V] from the normed hidden states [..., D]; on a mesh each device keeps its part of V. head: None is the target's."""
    weight = output_head(target) if head is None else head
    return constrain(linear(hidden, weight), "rows", *(None,) * (hidden.ndim - 2), "vocab").astype(jnp.float32)


PART = 2048
"""Tokens of the vocabulary whose logits a CPU takes at a time, so that they stay in its caches."""


def best_token(target: Target, hidden: jax.Array, head: jax.Array | None = None) -> jax.Array:
    """int32 [...]: the argmax over the full vocabulary of the normed hidden states [..., D], ties to the lowest id."""
    tied = target.config.tie_embeddings
    table = target.embed[...] if tied else target.head[...]
    if on_one_cpu() and isinstance(table, jax.Array):
        if bfloat.is_native(hidden, table):
            return bfloat.best(hidden.reshape(-1, hidden.shape[-1]), table, turned=tied).reshape(hidden.shape[:-1])
        if target.config.vocab_size > PART:
            return _best_by_parts(table, 0 if tied else 1, hidden)
    return _first_best(logits(target, hidden, head))[1]


def _first_best(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the maximum over the last axis, where it first stands). Two plain reductions: XLA's own argmax is far slower on a CPU."""
    ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    return peak[..., 0], jnp.min(jnp.where(scores == peak, ids, scores.shape[-1]), axis=-1)


def _best_by_parts(table: jax.Array, axis: int, hidden: jax.Array) -> jax.Array:
    """`best_token`, with the vocabulary along `axis` of the table: a transposed table is then never written out either."""
    V = table.shape[axis]
    flat = hidden.reshape(-1, hidden.shape[-1])

    def part(best: tuple[jax.Array, jax.Array], start: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        weight = jax.lax.dynamic_slice_in_dim(table, start, PART, axis)
        axes = (((1,), (1 - axis,)), ((), ()))
        scores = jax.lax.dot_general(flat, weight, axes, precision=precision(flat.dtype), preferred_element_type=jnp.float32)
        peak, at = _first_best(scores)
        better = peak > best[0]
        return (jnp.where(better, peak, best[0]), jnp.where(better, start + at, best[1])), None

    # The last part begins early enough to be whole; what it has in common with the one before it is no better.
    starts = jnp.minimum(jnp.arange(0, V, PART, dtype=jnp.int32), V - PART)
    none = (jnp.full(len(flat), -jnp.inf, jnp.float32), jnp.full(len(flat), V, jnp.int32))
    return jax.lax.scan(part, none, starts)[0][1].reshape(hidden.shape[:-1])


def parts(config: TargetConfig) -> dict[str, tuple[str, tuple, tuple[int, ...]]]:
    """Where a checkpoint's separate projections live: name -> (parameter, index into it, shape there), without the input axis."""
    K, G, H, F = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim, config.intermediate_size
    return {
        "q": ("qkv", (slice(None), slice(0, G)), (K, G, H)),
        "k": ("qkv", (slice(None), G), (K, H)),
        "v": ("qkv", (slice(None), G + 1), (K, H)),
        "gate": ("gate_up", (0,), (F,)),
        "up": ("gate_up", (1,), (F,)),
    }


def _weights(block: TargetBlock, name: str) -> tuple[Any, Any]:
    """(weight, bias or None) of a projection."""
    bias = getattr(block, f"{name}_bias", None)
    return getattr(block, name)[...], None if bias is None else bias[...]
