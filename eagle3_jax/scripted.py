"""A draft that proposes what it is told, at the real cost of a head's passes: for tests and for what-if studies.

"What would a head that accepts x tokens be worth on this machine?" needs no such head: `ScriptedDraft` runs a real (even
untrained) head for its time and puts scripted tokens in place of its proposals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.cache import BlockKV, Cache
from eagle3_jax.draft import Eagle3Draft

LOUD = 1e4
"""Added to the scripted token's logit: outranks every other candidate, and any noise."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScriptedDraft:
    """Proposes script[row, P] for absolute position P with probability chance[level], else the next id above it.

    inner: the head whose passes are run. script: int32 [B, P]. chance: float32 [levels]; deeper levels use the last entry.
    seed: uint32, keys the coin of each (row, position, level). The vocabulary is the target's own: ids 0..V-1.
    """

    inner: Eagle3Draft
    script: jax.Array
    chance: jax.Array
    seed: jax.Array

    @classmethod
    def of(cls, inner: Eagle3Draft, script: Sequence[Sequence[int]], chance: float | Sequence[float] = 1.0, seed: int = 0) -> ScriptedDraft:
        """script: per row the tokens at absolute positions 0, 1, ...: the prompt, then what is to be proposed."""
        longest = max(len(row) for row in script)
        padded = np.zeros((len(script), longest), np.int32)
        for i, row in enumerate(script):
            padded[i, : len(row)] = row
        chances = np.atleast_1d(np.asarray(chance, np.float32))
        if np.any((chances < 0) | (chances > 1)):
            raise ValueError(f"chance {chance!r}: probabilities must lie in 0..1")
        return cls(inner, jnp.asarray(padded), jnp.asarray(chances), jnp.uint32(seed))

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    @property
    def target_ids(self) -> jax.Array:
        return jnp.arange(self.inner.config.vocab_size, dtype=jnp.int32)

    def new_cache(self, batch: int, slots: int) -> Cache:
        return self.inner.new_cache(batch, slots)

    def begin(self, embed_VD: jax.Array, cache: Cache, first_B: jax.Array) -> Cache:
        return self.inner.begin(embed_VD, cache, first_B)

    def extend(
        self, embed_VD: jax.Array, cache: Cache, features_BTA: jax.Array, tokens_BT: jax.Array, count_B: jax.Array, *, first: bool = False
    ) -> tuple[Cache, jax.Array, jax.Array]:
        cache, logits, carry = self.inner.extend(embed_VD, cache, features_BTA, tokens_BT, count_B, first=first)
        return cache, self._speak(logits[:, None], cache.lengths + 1, 0)[:, 0], carry

    def expand(
        self, embed_VD: jax.Array, cache: Cache, tokens_BW: jax.Array, carry_BWD: jax.Array, mask_BWR: jax.Array, earlier: BlockKV | None
    ) -> tuple[jax.Array, jax.Array, BlockKV]:
        logits, carry, kv = self.inner.expand(embed_VD, cache, tokens_BW, carry_BWD, mask_BWR, earlier)
        level = kv[0].shape[1] // tokens_BW.shape[1]
        return self._speak(logits, cache.lengths + 1 + level, level), carry, kv

    def _speak(self, logits_BWU: jax.Array, positions_B: jax.Array, level: int) -> jax.Array:
        """The head's logits laid out over V, with the scripted token far above them: its passes stay needed, its opinion does not count."""
        B, W, _ = logits_BWU.shape
        V = self.inner.config.vocab_size
        rows = jnp.arange(B, dtype=jnp.int32)
        at = jnp.clip(positions_B, 0, self.script.shape[1] - 1)
        truth = self.script[rows, at]

        def coin(row: jax.Array, position: jax.Array) -> jax.Array:
            key = jax.random.key(self.seed, impl="threefry2x32")
            for part in (row, position, level):
                key = jax.random.fold_in(key, part)
            return jax.random.uniform(key, (), jnp.float32)

        chance = self.chance[min(level, self.chance.shape[0] - 1)]
        token = jnp.where(jax.vmap(coin)(rows, positions_B) < chance, truth, (truth + 1) % V)
        spread = jnp.full((B, W, V), -LOUD, jnp.float32).at[:, :, self.inner.target_ids].set(logits_BWU)
        loud = jnp.arange(V, dtype=jnp.int32)[None, None, :] == token[:, None, None]
        return spread + jnp.where(loud, LOUD + LOUD, 0.0)
