"""The vocabulary maps of a head's file: `d2t` int64 [U] holds OFFSETS (target id = draft id + offset), `t2d` bool [V] marks the kept ids.

In memory there is one map, the absolute ids; both tensors are absent from a file whose head keeps the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from eagle3_jax.config import DraftConfig
from eagle3_jax.weights.table import WeightsError

MAPS = ("d2t", "t2d")


def read_vocab_map(maps: Mapping[str, np.ndarray], config: DraftConfig, where: str) -> np.ndarray:
    """int32 [U] absolute target ids, ascending, from the stored `d2t` offsets and `t2d` mask; identity where neither is stored.

    Raises WeightsError for a wrong shape or dtype, an id outside the vocabulary, ids that do not ascend, or maps that disagree.
    """
    U, V = config.draft_vocab_size, config.vocab_size
    ids = np.arange(U, dtype=np.int64)
    if "d2t" in maps:
        offsets = maps["d2t"]
        if offsets.shape != (U,) or offsets.dtype.kind not in "iu":
            raise WeightsError(f"{where}: tensor 'd2t' is {offsets.dtype} {list(offsets.shape)}, expected integers [{U}]")
        ids = ids + offsets.astype(np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= V))
    if outside.size:
        i = int(outside[0])
        raise WeightsError(f"{where}: tensor 'd2t' sends draft id {i} to {int(ids[i])}, outside the vocabulary of {V} (d2t holds offsets)")
    falling = np.flatnonzero(np.diff(ids) <= 0)
    if falling.size:
        i = int(falling[0])
        raise WeightsError(f"{where}: tensor 'd2t' sends draft ids {i} and {i + 1} to {int(ids[i])} and {int(ids[i + 1])}: ids must ascend")
    if "t2d" in maps:
        mask = maps["t2d"]
        if mask.shape != (V,) or mask.dtype.kind not in "biu":
            raise WeightsError(f"{where}: tensor 't2d' is {mask.dtype} {list(mask.shape)}, expected bool [{V}]")
        if not np.array_equal(np.flatnonzero(mask), ids):
            raise WeightsError(f"{where}: tensors 't2d' and 'd2t' disagree: {np.count_nonzero(mask)} and {U} ids, not the same ones")
    return ids.astype(np.int32)


def write_vocab_map(ids: np.ndarray, config: DraftConfig) -> dict[str, np.ndarray]:
    """The tensors that hold absolute ids [U]; none when U == V. Raises WeightsError for ids that would not load again."""
    ids = np.asarray(ids).astype(np.int64)
    mask = np.zeros(config.vocab_size, np.bool_)
    mask[ids[(ids >= 0) & (ids < config.vocab_size)]] = True
    maps = {"d2t": ids - np.arange(config.draft_vocab_size), "t2d": mask}
    read_vocab_map(maps, config, "the head's d2t")
    return maps if config.draft_vocab_size < config.vocab_size else {}
