"""What passes cost on this machine, by their width: the half of a speed-up that the machine decides.

A cycle is one catch-up pass of the draft, one draft pass per further level, and one target pass over the tree. Each is timed in a
loop on the device, with the search for the best tokens that belongs to it, on a half-full cache. Widths in between are interpolated.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import target as target_model
from eagle3_jax.cache import Cache
from eagle3_jax.drafting import Draft
from eagle3_jax.sharding import on_mesh_of
from eagle3_jax.target import Target
from eagle3_jax.tree import Tree

Pass = Callable[[int], Any]
"""Runs so many passes and waits for them."""

TARGET_WIDTHS = (1, 2, 4, 6, 8, 12, 16, 64)
EXTEND_WIDTHS = (2, 5, 9)
EXPAND_WIDTHS = (1, 4, 10)
SLOTS = 512


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of one pass of `batch` rows by its width: target, extend (the draft's catch-up), expand (one further level)."""

    batch: int
    target: Mapping[int, float]
    extend: Mapping[int, float]
    expand: Mapping[int, float]

    @property
    def plain(self) -> float:
        """Seconds of one step of plain decoding."""
        return at_width(self.target, 1)

    def cycle(self, tree: Tree) -> float:
        """Seconds of one draft-and-verify cycle."""
        return (
            at_width(self.target, tree.nodes) + at_width(self.extend, tree.depth + 1) + (tree.depth - 1) * at_width(self.expand, tree.width)
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {"batch": self.batch, **{k: {str(w): s for w, s in getattr(self, k).items()} for k in ("target", "extend", "expand")}}

    @classmethod
    def from_json(cls, value: Any) -> Costs:
        """Raises KeyError, TypeError or ValueError for anything that `to_json` would not have written."""
        parts = {k: {int(w): float(s) for w, s in value[k].items()} for k in ("target", "extend", "expand")}
        if not all(part and all(w > 0 and s > 0 for w, s in part.items()) for part in parts.values()):
            raise ValueError("costs must be positive, at one width at least")
        return cls(int(value["batch"]), **parts)


def at_width(seconds: Mapping[int, float], width: int) -> float:
    """The cost at a width: linear between measured ones, and beyond the last as between the last two."""
    widths = sorted(seconds)
    if width > widths[-1] and len(widths) > 1:
        a, b = widths[-2:]
        return seconds[b] + (seconds[b] - seconds[a]) * (width - b) / (b - a)
    return float(np.interp(width, widths, [seconds[w] for w in widths]))


def measure(
    target: Target,
    draft: Draft,
    batch: int = 1,
    *,
    rounds: int = 5,
    target_widths: Sequence[int] = TARGET_WIDTHS,
    extend_widths: Sequence[int] = EXTEND_WIDTHS,
    expand_widths: Sequence[int] = EXPAND_WIDTHS,
) -> Costs:
    """Times every pass, in turns; medians. Compiles a dozen programs the first time, then takes about a second."""
    slots = min(SLOTS, target.config.max_position)
    vocab = draft.target_ids.shape[0]
    passes: dict[tuple[str, int], Pass] = {}
    for width in target_widths:
        passes["target", width] = target_passes(target, width, batch, draft.taps, slots)
    for width in extend_widths:
        passes["extend", width] = extend_passes(target, draft, width, batch, slots)
    for width in sorted({min(width, vocab) for width in expand_widths}):
        passes["expand", width] = expand_passes(target, draft, width, batch, slots)
    seconds = in_turns(passes, rounds)
    parts: dict[str, dict[int, float]] = {"target": {}, "extend": {}, "expand": {}}
    for (kind, width), value in seconds.items():
        parts[kind][width] = value
    return Costs(batch, **parts)


def in_turns(passes: Mapping[Any, Pass], rounds: int, at_least: float = 0.01) -> dict[Any, float]:
    """Median seconds of one pass each; a call makes as many passes as take `at_least` seconds. The first call, not counted, compiles."""
    counts = {}
    for key, call in passes.items():
        call(1)
        seconds = _timed(call, 1)
        counts[key] = max(1, min(64, round(at_least / max(seconds, 1e-6))))
    times: dict[Any, list[float]] = {key: [] for key in passes}
    for i in range(rounds):
        for key in list(passes) if i % 2 == 0 else list(reversed(passes)):
            times[key].append(_timed(passes[key], counts[key]) / counts[key])
    return {key: statistics.median(values) for key, values in times.items()}


def _timed(call: Pass, count: int) -> float:
    start = time.perf_counter()
    call(count)
    return time.perf_counter() - start


def target_passes(target: Target, width: int, batch: int = 1, taps: tuple[int, ...] = (), slots: int = SLOTS) -> Pass:
    """Target passes of `width` tokens over a half-full cache, with the best token at each."""
    cache = half_full(target.new_cache(batch, slots))
    return lambda count: jax.block_until_ready(_target_passes(target, cache, jnp.int32(count), width, taps))


def extend_passes(target: Target, draft: Draft, width: int, batch: int = 1, slots: int = SLOTS) -> Pass:
    """The draft's catch-up passes over `width` real pairs, with the best token after them."""
    cache = half_full(draft.new_cache(batch, slots))
    features = jnp.ones((batch, width, target.config.hidden_size * len(draft.taps)), target.dtype)
    return lambda count: jax.block_until_ready(_extend_passes(target, draft, cache, features, jnp.int32(count)))


def expand_passes(target: Target, draft: Draft, width: int, batch: int = 1, slots: int = SLOTS) -> Pass:
    """Draft passes over one further level of `width` nodes, with the best `width` children of each."""
    cache = half_full(draft.new_cache(batch, slots))
    features = jnp.ones((batch, 2, target.config.hidden_size * len(draft.taps)), target.dtype)
    return lambda count: jax.block_until_ready(_expand_passes(target, draft, cache, features, jnp.int32(count), width))


def half_full(cache: Cache) -> Cache:
    """The cache as if half its slots held tokens."""
    return dataclasses.replace(cache, lengths=jnp.full_like(cache.lengths, cache.slots // 2))


@jax.jit(static_argnames=("width", "taps"))
def _target_passes(target: Target, cache: Cache, count: jax.Array, width: int, taps: tuple[int, ...]) -> jax.Array:
    batch = cache.lengths.shape[0]

    def body(_: Any, tokens: jax.Array) -> jax.Array:
        positions = cache.lengths[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        mask = jnp.tril(jnp.ones((width, width), bool))[None]
        out = target_model.forward(target, tokens, positions, mask, cache, taps)
        best = _best(target_model.logits(target, out.hidden), 1)[..., 0]
        # Features and K/V of a cycle are used: here they must look so, or they would not be computed.
        used = sum((jnp.sum(x[..., :1].astype(jnp.float32)) for x in (out.features, *out.kv[-1])), jnp.float32(0))
        return jnp.where(jnp.isfinite(used), best, tokens)

    with on_mesh_of(target):
        return jax.lax.fori_loop(0, count, body, jnp.full((batch, width), 1, jnp.int32))


@jax.jit
def _extend_passes(target: Target, draft: Draft, cache: Cache, features_BTA: jax.Array, count: jax.Array) -> jax.Array:
    batch, width, _ = features_BTA.shape

    def body(_: Any, tokens: jax.Array) -> jax.Array:
        # Always true, which XLA cannot know: features that never change would be fused once, outside the loop.
        features = jnp.where(tokens[:, :1, None] >= 0, features_BTA, 0)
        _, logits, _ = draft.extend(target.embed[...], cache, features, tokens, jnp.ones((batch,), jnp.int32))
        return tokens.at[:, 0].set(draft.target_ids[_best(logits, 1)[:, 0]])

    with on_mesh_of(target):
        return jax.lax.fori_loop(0, count, body, jnp.full((batch, width), 1, jnp.int32))


@jax.jit(static_argnames=("width",))
def _expand_passes(target: Target, draft: Draft, cache: Cache, features_BTA: jax.Array, count: jax.Array, width: int) -> Any:
    batch = features_BTA.shape[0]
    embed, tokens = target.embed[...], jnp.full((batch, width), 1, jnp.int32)
    own = jnp.broadcast_to(jnp.eye(width, dtype=bool)[None], (batch, width, width))
    mask = jnp.concatenate([own, own], axis=-1)

    with on_mesh_of(target):
        _, _, carry = draft.extend(embed, cache, features_BTA, tokens[:, :1].repeat(2, axis=1), jnp.ones((batch,), jnp.int32))
        carry = jnp.broadcast_to(carry[:, None], (batch, width, carry.shape[-1]))
        _, carry, earlier = draft.expand(embed, cache, tokens, carry, own, None)

        def body(_: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            logits, carry, _ = draft.expand(embed, cache, state[0], state[1], mask, earlier)
            return draft.target_ids[_best(jax.nn.log_softmax(logits, axis=-1), width)][:, :, 0], carry

        return jax.lax.fori_loop(0, count, body, (tokens, carry))


def _best(x: jax.Array, count: int) -> jax.Array:
    return jax.lax.top_k(x, count)[1].astype(jnp.int32)
