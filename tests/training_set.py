"""A tiny target, a tiny head and a feature cache of random text, for the tests of training."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import initialize, named_variables
from eagle3_jax.target import Target
from eagle3_jax.training.features import FeatureCache, Selection, select, write_cache
from eagle3_jax.training.ttt import Frozen

TARGET = TargetConfig(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=8, max_position=128
)
TAPS = (1, 2, 3)
KEPT = np.arange(0, 48, 2, dtype=np.int32)


class Tokens(NamedTuple):
    ids: np.ndarray
    response: np.ndarray


def tiny_target(seed: int = 0) -> Target:
    return initialize(Target(TARGET), jax.random.key(seed))


def tiny_draft(seed: int = 1) -> Eagle3Draft:
    draft = initialize(Eagle3Draft(DraftConfig.for_target(TARGET, len(KEPT), TAPS)), jax.random.key(seed))
    draft.d2t[...] = jnp.asarray(KEPT)
    return draft


def tiny_frozen(target: Target) -> Frozen:
    return Frozen(target.embed[...], target.head[...][:, KEPT])


def conversations(count: int = 24, seed: int = 0, longest: int = 20) -> list[Tokens]:
    """Random conversations of one or two answers."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        parts = [(0, int(rng.integers(1, 5))), (1, int(rng.integers(2, longest)))]
        if i % 3 == 0:
            parts += [(0, int(rng.integers(1, 4))), (2, int(rng.integers(2, 6)))]
        response = np.concatenate([np.full(n, r, np.int32) for r, n in parts])
        made.append(Tokens(rng.integers(0, TARGET.vocab_size, len(response)).astype(np.int32), response))
    return made


def tiny_cache(folder: Path, examples: list[Tokens] | None = None, shard_tokens: int = 150) -> FeatureCache:
    return write_cache(tiny_target(), TAPS, selection(examples), folder, max_tokens=32, shard_tokens=shard_tokens, batch_tokens=256)


def selection(examples: list[Tokens] | None = None) -> Selection:
    return select(examples if examples is not None else conversations(), 32)


def parameters(draft: Eagle3Draft) -> dict[str, np.ndarray]:
    return {name: np.asarray(variable.get_value()) for name, variable in named_variables(draft)}
