"""A small language model as the draft: vanilla speculative sampling (paper, section 2.1) in the same decoder.

It reads tokens alone, none of the target's features, so any model with the target's vocabulary will do: a smaller one of the
same family, the target itself with int8 weights, or, in tests, the target itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax import target as target_model
from eagle3_jax.attention import causal_mask
from eagle3_jax.cache import Cache, after, append
from eagle3_jax.target import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModelDraft:
    """`model` proposes its own continuation. After n pairs its cache holds n+1 tokens: the first one comes by `begin`."""

    model: Target

    @classmethod
    def of(cls, model: Target, target: Target) -> LanguageModelDraft:
        """A draft for `target`. Raises ValueError when the vocabularies differ in size."""
        own, wanted = model.config.vocab_size, target.config.vocab_size
        if own != wanted:
            raise ValueError(f"a draft model must share the target's vocabulary: it has {own} tokens, the target {wanted}")
        return cls(model)

    @property
    def taps(self) -> tuple[int, ...]:
        """None: it reads no feature of the target."""
        return ()

    @property
    def target_ids(self) -> jax.Array:
        """int32 [V]: its ids are the target's."""
        return jnp.arange(self.model.config.vocab_size, dtype=jnp.int32)

    @property
    def dtype(self) -> jnp.dtype:
        """The compute and cache type."""
        return self.model.dtype

    def new_cache(self, batch: int, slots: int) -> Cache:
        """An empty cache of tokens."""
        return self.model.new_cache(batch, slots)

    def begin(self, embed_VD: jax.Array, cache: Cache, first_B: jax.Array) -> Cache:
        """The cache with each row's first token, which stands in no pair."""
        cache, _, _ = self.extend(embed_VD, cache, jnp.zeros((*first_B.shape, 1, 0)), first_B[:, None], jnp.ones_like(first_B))
        return cache

    def extend(
        self, embed_VD: jax.Array, cache: Cache, features_BTA: jax.Array, tokens_BT: jax.Array, count_B: jax.Array, *, first: bool = False
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Appends the first `count` of T tokens; returns (cache, logits float32 [B, V] after each row's last one, an empty carry).

        first: of no account, since the cache holds each row's first token even then.
        """
        T = tokens_BT.shape[1]
        positions = cache.lengths[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        out = target_model.forward(self.model, tokens_BT, positions, causal_mask(T), cache)
        last = jnp.maximum(count_B - 1, 0)[:, None, None]
        logits = target_model.logits(self.model, jnp.take_along_axis(out.hidden, last, axis=1)[:, 0])
        return append(cache, out.kv, None, after(count_B, out.hidden)), logits, out.hidden[:, 0, :0]

    def expand(
        self, embed_VD: jax.Array, cache: Cache, tokens_BW: jax.Array, carry_BWD: jax.Array, mask_BWR: jax.Array, earlier: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Runs one level of W drafted nodes; returns (logits [B, W, V], an empty carry, K/V of all levels so far, per block)."""
        level = 0 if earlier is None else earlier[0][0].shape[1] // tokens_BW.shape[1]
        positions = jnp.broadcast_to(cache.lengths[:, None] + level, tokens_BW.shape)
        out = target_model.forward(self.model, tokens_BW, positions, mask_BWR, cache, earlier=earlier)
        return target_model.logits(self.model, out.hidden), carry_BWD, out.kv
