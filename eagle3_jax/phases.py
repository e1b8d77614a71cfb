"""Where the time of a decode cycle goes: drafting, verification and commit each compiled alone, and the cycle they are part of.

Parts run many times inside one program, on caches half full, so that no call overhead is in them. The cycle's time is that of
real decoding; what it takes beyond its parts (choosing tokens, walking the tree, stop checks) is the rest.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax import target as target_model
from eagle3_jax.cache import BlockKV, Cache, append
from eagle3_jax.drafting import Draft, grow
from eagle3_jax.generate import bucket
from eagle3_jax.sampling import argmax
from eagle3_jax.target import Target
from eagle3_jax.tree import Chain, Tree, select

PASSES = 16
"""Runs of a part inside one program."""


@dataclasses.dataclass(frozen=True)
class Phases:
    """Seconds of one cycle. draft: the head's catch-up on the last kept tokens and the growth of the tree. verify: the target's pass over
    the tree, logits included. commit: writing the kept path into the caches. rest: the whole less these; below zero when the parts
    overlap in the whole."""

    mode: str
    draft: float
    verify: float
    commit: float
    whole: float

    @property
    def rest(self) -> float:
        return self.whole - self.draft - self.verify - self.commit


def phases(
    target: Target,
    draft: Draft | None,
    mode: str,
    tree: Chain | Tree | None,
    whole: float,
    *,
    batch: int = 1,
    slots: int = 256,
    repeats: int = 3,
) -> Phases:
    """The parts of a cycle of this size.

    whole: its measured time, as in `ModeResult.cycle_seconds`. slots: of the caches, half of them filled.
    """
    slots = bucket(slots, 64)
    shape = tree.tree if isinstance(tree, Chain) else tree
    nodes = 1 if shape is None else shape.nodes
    path = 1 if shape is None else shape.depth + 1
    cache = _half_full(target.new_cache(batch, slots))
    taps = draft.taps if draft is not None and shape is not None else ()
    tokens = jnp.full((batch, nodes), 5, jnp.int32)
    c = target.config
    fresh = [(jnp.ones((batch, nodes, c.num_kv_heads, c.head_dim), target.dtype),) * 2 for _ in range(c.num_layers)]
    seconds = {
        "verify": _seconds(partial(_verify, target, cache, tokens, taps), repeats),
        "commit": _seconds(partial(_commit, cache, fresh, jnp.zeros((batch, path), jnp.int32)), repeats),
        "draft": 0.0,
    }
    if draft is not None and shape is not None:
        features = jnp.ones((batch, path, c.hidden_size * len(taps)), target.dtype)
        pairs = _half_full(draft.new_cache(batch, slots))
        seconds["draft"] = _seconds(partial(_draft, draft, target.embed[...], pairs, features, tokens[:, :path], shape), repeats)
    return Phases(mode=mode, whole=whole, **seconds)


@partial(jax.jit, static_argnames=("taps",))
def _verify(target: Target, cache: Cache, tokens: jax.Array, taps: tuple[int, ...]) -> jax.Array:
    """A pass costs the same whatever the tree's shape, so a chain stands for it."""
    B, M = tokens.shape
    offsets = jnp.arange(M, dtype=jnp.int32)[None]
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((M, M), bool)), (B, M, M))

    def body(_: int, tokens: jax.Array) -> jax.Array:
        out = target_model.forward(target, tokens, cache.lengths[:, None] + offsets, mask, cache, taps)
        best = argmax(target_model.logits(target, out.hidden))
        # Each pass reads what the one before chose, so that none can be dropped or hoisted.
        return jnp.where(jnp.all(jnp.isfinite(out.features), axis=-1), best, tokens)

    return jax.lax.fori_loop(0, PASSES, body, tokens)


@jax.jit
def _commit(cache: Cache, new: list[BlockKV], path_BC: jax.Array) -> Cache:
    B, C = path_BC.shape

    def body(i: int, cache: Cache) -> Cache:
        rows = (path_BC + jnp.int32(i)) % new[0][0].shape[1]
        written = append(cache, new, rows, jnp.full((B,), C, jnp.int32))
        return dataclasses.replace(written, lengths=cache.lengths)

    return jax.lax.fori_loop(0, PASSES, body, cache)


@partial(jax.jit, static_argnames=("tree",))
def _draft(draft: Draft, embed: jax.Array, cache: Cache, features: jax.Array, tokens: jax.Array, tree: Tree) -> Any:
    B, C = tokens.shape

    def body(_: int, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, tokens = carry
        longer, logits, state = draft.extend(embed, cache, features, tokens, jnp.full((B,), C, jnp.int32))
        pool = grow(draft, embed, longer, logits, state, tree, lambda _, raw: jax.nn.log_softmax(raw, axis=-1))[0]
        grown = select(tokens[:, 0], pool, tree)
        return dataclasses.replace(longer, lengths=cache.lengths), jnp.broadcast_to(grown.tokens[:, 1:2], tokens.shape)

    return jax.lax.fori_loop(0, PASSES, body, (cache, tokens))


def _half_full(cache: Cache) -> Cache:
    return dataclasses.replace(cache, lengths=jnp.full_like(cache.lengths, cache.slots // 2))


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of one of the passes inside the call; the first, which compiles, is not counted."""
    times = []
    for i in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        if i:
            times.append(time.perf_counter() - start)
    return statistics.median(times) / PASSES


def shares(found: Sequence[Phases]) -> dict[str, list[float]]:
    """Milliseconds by part, one figure per size, for a stacked chart."""
    return {part: [1e3 * max(0.0, getattr(p, part)) for p in found] for part in ("draft", "verify", "commit", "rest")}
