"""The draft vocabulary: the target's tokens that answers use most.

Source: paper section 3 (the head predicts a reduced vocabulary); official code `eagle/traineagle3/cnets.py`, `scandata`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np


class Labelled(Protocol):
    """ids int32 [n] and response int32 [n] (0: context)."""

    @property
    def ids(self) -> np.ndarray: ...

    @property
    def response(self) -> np.ndarray: ...


def count_tokens(examples: Iterable[Labelled], vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each token occurs in responses (end-of-turn included, context not).

    Raises ValueError for an id outside 0..V-1: such data belongs to another target.
    """
    counts = np.zeros(vocab_size, np.int64)
    for number, example in enumerate(examples):
        ids = np.asarray(example.ids)[np.asarray(example.response) > 0]
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"example {number}: token ids {ids.min()}..{ids.max()} leave the target's vocabulary of {vocab_size}")
        counts += np.bincount(ids, minlength=vocab_size)
    return counts


def select_vocab(counts: np.ndarray, size: int) -> np.ndarray:
    """int32 [U], ascending: the `size` most frequent ids of counts [V]; equal counts keep the lower id."""
    counts = np.asarray(counts)
    if not 0 < size <= len(counts):
        raise ValueError(f"draft vocabulary size {size} must lie in 1..{len(counts)}, the target's vocabulary")
    if not counts.any():
        raise ValueError("no response token was counted: the draft vocabulary would be arbitrary")
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(counts: np.ndarray, kept: np.ndarray) -> float:
    """Share of the counted tokens [V] that the kept ids [U] cover, 0..1 (0 when nothing was counted)."""
    total = int(np.asarray(counts).sum())
    return float(np.asarray(counts)[np.asarray(kept)].sum() / total) if total else 0.0
