"""What a draft must offer the decoder, and how a tree is grown from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from eagle3_jax.cache import Cache
from eagle3_jax.sharding import local, shards
from eagle3_jax.tree import Pool, Tree


class Draft(Protocol):
    """A pytree that proposes tokens. The EAGLE-3 head is one; a scripted draft or a small language model can be others.

    Pair i is (features of token i, token i+1). After n pairs the draft predicts the token at absolute position n+1.
    U is the draft's vocabulary; `target_ids` maps it to the target's, ascending.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """Entering-block ids of the target features that `extend` reads."""
        ...

    @property
    def target_ids(self) -> jax.Array:
        """int32 [U]."""
        ...

    def new_cache(self, batch: int, slots: int) -> Cache:
        """An empty cache of pairs."""
        ...

    def begin(self, embed_VD: jax.Array, cache: Cache, first_B: jax.Array) -> Cache:
        """What an empty cache becomes when it hears each row's first token, int32 [B], which stands in no pair."""
        ...

    def extend(
        self, embed_VD: jax.Array, cache: Cache, features_BTA: jax.Array, tokens_BT: jax.Array, count_B: jax.Array, *, first: bool = False
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Appends the first `count` of T real pairs; returns (cache, logits float32 [B, U] and carry [B, D] of each row's last one).

        first: no pair stands in the cache yet.
        """
        ...

    def expand(
        self, embed_VD: jax.Array, cache: Cache, tokens_BW: jax.Array, carry_BWD: jax.Array, mask_BWR: jax.Array, earlier: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Runs one level of W drafted nodes on top of `earlier` levels; returns (logits [B, W, U], carry [B, W, D], K/V of all levels).

        The carry is the parent's; `earlier` is the K/V that the level before returned, None at the first.
        Nothing enters the cache: what a draft makes of its own output never survives the cycle.
        """
        ...


ScoreRule = Callable[[int, jax.Array], jax.Array]
"""(level from 0, logits [B, W, U]) -> log-probabilities float32 [B, W, U], each <= 0, by which candidates are ranked."""


def grow(
    draft: Draft, embed_VD: jax.Array, cache: Cache, logits_BU: jax.Array, carry_BD: jax.Array, tree: Tree, score: ScoreRule
) -> tuple[Pool, list[jax.Array]]:
    """Grows the candidate pool level by level; returns it and the raw logits of every level ([B, W or 1, U]).

    Per level: the `width` best children of each frontier node join the pool, and the `width` best of them all are the next frontier.
    """
    B, W = logits_BU.shape[0], tree.width
    ids = draft.target_ids
    level_logits = [logits_BU[:, None]]
    scores, best = (x[:, 0] for x in top_candidates(score(0, level_logits[0]), W))
    tokens = ids[best]
    pool_tokens, pool_scores = [tokens], [scores]
    pool_parents = [jnp.full((B, W), -1, jnp.int32)]
    index = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W))
    carry = jnp.broadcast_to(carry_BD[:, None], (B, W, carry_BD.shape[-1]))
    mask = jnp.zeros((B, W, 0), bool)
    earlier: Any = None
    base = W
    for level in range(1, tree.depth):
        own = jnp.broadcast_to(jnp.eye(W, dtype=bool), (B, W, W))
        mask = jnp.concatenate([mask, own], axis=-1)
        raw, carry, earlier = draft.expand(embed_VD, cache, tokens, carry, mask, earlier)
        level_logits.append(raw)
        child_scores, best = top_candidates(score(level, raw), W)
        child_scores = (scores[:, :, None] + child_scores).reshape(B, W * W)
        child_tokens = ids[best].reshape(B, W * W)
        pool_tokens.append(child_tokens)
        pool_scores.append(child_scores)
        pool_parents.append(jnp.repeat(index, W, axis=1))
        if level + 1 == tree.depth:
            break
        scores, chosen = _top(child_scores, W)
        tokens = jnp.take_along_axis(child_tokens, chosen, axis=1)
        parent = chosen // W
        index = base + chosen
        carry = jnp.take_along_axis(carry, parent[:, :, None], axis=1)
        mask = jnp.take_along_axis(mask, parent[:, :, None], axis=1)
        base += W * W
    return Pool(jnp.concatenate(pool_tokens, 1), jnp.concatenate(pool_scores, 1), jnp.concatenate(pool_parents, 1)), level_logits


def top_candidates(scores_BWU: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` best of the draft vocabulary and their draft ids, both [B, W, count], the lowest id first on ties.

    On a mesh every device ranks its own part of the vocabulary; only the parts' winners are brought together.
    """
    parts = shards("draft_vocab", scores_BWU.shape[-1])
    if parts == 1:
        return _top(scores_BWU, count)

    def rank(own: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = _top(own, min(count, own.shape[-1]))
        ids = ids + jax.lax.axis_index("tensor").astype(jnp.int32) * own.shape[-1]
        values, ids = (jax.lax.all_gather(x, "tensor", axis=2, tiled=True) for x in (values, ids))
        best, at = _top(values, count)
        return best, jnp.take_along_axis(ids, at, axis=2)

    return local(rank, [("rows", None, "draft_vocab")], ("rows", None, None))(scores_BWU)


def _top(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of the last axis and their indices, the lowest first on ties."""
    values, indices = jax.lax.top_k(x, count)
    return values, indices.astype(jnp.int32)
