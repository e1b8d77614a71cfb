"""Where the time of a decode cycle goes: drafting, verification and commit each compiled alone, and the cycle they are part of.

Parts run many times inside one program, on caches half full, so that no call overhead is in them. The cycle's time is that of
real decoding; what it takes beyond its parts (choosing tokens, walking the tree, stop checks) is the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.cache import BlockKV, Cache, append
from eagle3_jax.decoding.buckets import bucket
from eagle3_jax.drafting import Draft, grow
from eagle3_jax.target import Target
from eagle3_jax.tree import Chain, Tree, select
from eagle3_jax.tuning.costs import Pass, half_full, in_turns, target_passes


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
    shape = None if tree is None else tree.tree
    nodes = 1 if shape is None else shape.nodes
    path = 1 if shape is None else shape.depth + 1
    taps = draft.taps if draft is not None and shape is not None else ()
    passes: dict[str, Pass] = {
        "verify": target_passes(target, nodes, batch, taps, slots),
        "commit": commit_passes(target, nodes, path, batch, slots),
    }
    if draft is not None and shape is not None:
        passes["draft"] = draft_passes(target, draft, shape, batch, slots)
    seconds = {"draft": 0.0, **in_turns(passes, repeats)}
    return Phases(mode=mode, whole=whole, **seconds)


def commit_passes(target: Target, nodes: int, path: int, batch: int, slots: int) -> Pass:
    """Writes of `path` of the pass's `nodes` tokens into a half-full cache."""
    c = target.config
    cache = half_full(target.new_cache(batch, slots))
    fresh = [(jnp.ones((batch, nodes, c.num_kv_heads, c.head_dim), target.dtype),) * 2 for _ in range(c.num_layers)]
    rows = jnp.zeros((batch, path), jnp.int32)
    return lambda count: jax.block_until_ready(_commit_passes(cache, fresh, rows, jnp.int32(count)))


def draft_passes(target: Target, draft: Draft, tree: Tree, batch: int, slots: int) -> Pass:
    """The draft's catch-up on the last kept tokens and the growth of a tree, over a half-full cache."""
    cache = half_full(draft.new_cache(batch, slots))
    features = jnp.ones((batch, tree.depth + 1, target.config.hidden_size * len(draft.taps)), target.dtype)
    return lambda count: jax.block_until_ready(_draft_passes(draft, target.embed[...], cache, features, jnp.int32(count), tree))


@jax.jit
def _commit_passes(cache: Cache, new: list[BlockKV], path_BC: jax.Array, count: jax.Array) -> Cache:
    B, C = path_BC.shape

    def body(i: jax.Array, cache: Cache) -> Cache:
        rows = (path_BC + i) % new[0][0].shape[1]
        written = append(cache, new, rows, jnp.full((B,), C, jnp.int32))
        return dataclasses.replace(written, lengths=cache.lengths)

    return jax.lax.fori_loop(0, count, body, cache)


@partial(jax.jit, static_argnames=("tree",))
def _draft_passes(draft: Draft, embed: jax.Array, cache: Cache, features: jax.Array, count: jax.Array, tree: Tree) -> Any:
    B, C, _ = features.shape

    def body(_: Any, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, tokens = carry
        longer, logits, state = draft.extend(embed, cache, features, tokens, jnp.full((B,), C, jnp.int32))
        pool = grow(draft, embed, longer, logits, state, tree, lambda _, raw: jax.nn.log_softmax(raw, axis=-1))[0]
        grown = select(tokens[:, 0], pool, tree)
        return dataclasses.replace(longer, lengths=cache.lengths), jnp.broadcast_to(grown.tokens[:, 1:2], tokens.shape)

    return jax.lax.fori_loop(0, count, body, (cache, jnp.full((B, C), 5, jnp.int32)))


def shares(found: Sequence[Phases]) -> dict[str, list[float]]:
    """Milliseconds by part, one figure per size, for a stacked chart."""
    return {part: [1e3 * max(0.0, getattr(p, part)) for p in found] for part in ("draft", "verify", "commit", "rest")}
