"""The draft vocabulary: the target's tokens that answers use most.

It is always held as absolute ids: int32 [U], ascending, entry u is the target id of draft id u. Only checkpoint files hold offsets.

Source: paper section 3 (the head predicts a reduced vocabulary); official code `eagle/traineagle3/cnets.py`, `scandata`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from eagle3_jax.whole_file import whole_file


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


def check_vocab(ids: np.ndarray, vocab_size: int, where: str) -> np.ndarray:
    """The ids as int32 [U]; ValueError unless they are integers, distinct, ascending and inside 0..V-1."""
    ids = np.asarray(ids)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise ValueError(f"{where}: expected a list of token ids, found {ids.dtype} {list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"{where}: target ids {ids.min()}..{ids.max()} leave the target's vocabulary of {vocab_size}")
    if np.any(np.diff(ids.astype(np.int64)) <= 0):
        raise ValueError(f"{where}: target ids must be distinct and ascending")
    return ids.astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class DraftVocab:
    """target_ids int32 [U] ascending, out of vocab_size (V); coverage: their share of the counted response tokens, of `seen` kinds."""

    target_ids: np.ndarray
    vocab_size: int
    coverage: float
    seen: int


def save_vocab(path: str | Path, vocab: DraftVocab) -> None:
    """Writes a JSON file: {"vocab_size", "coverage", "seen", "target_ids"}; absolute ids, never offsets. Complete or absent."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {"vocab_size": vocab.vocab_size, "coverage": vocab.coverage, "seen": vocab.seen, "target_ids": vocab.target_ids.tolist()}
    with whole_file(path) as part:
        part.write_text(json.dumps(fields), encoding="utf-8")


def load_vocab(path: str | Path) -> DraftVocab:
    """Reads a file of `save_vocab`. Raises ValueError naming the file and what is wrong with it."""
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        size = int(fields["vocab_size"])
        ids = check_vocab(np.array(fields["target_ids"]), size, f"{path}: target_ids")
        return DraftVocab(ids, size, float(fields["coverage"]), int(fields["seen"]))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a draft vocabulary file ({type(error).__name__}: {error})") from None
