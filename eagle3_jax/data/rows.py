"""Examples of any length in rows of one static length.

A row holds whole examples one behind the other. Segment ids tell them apart (1, 2, ...; 0 is padding), positions restart in each.
Whoever uses a row must let nothing cross a segment: attention, the shifted inputs and targets of every training-time-test step, the mask.
Response numbers restart in each segment too: an answer is named by (segment, response).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from eagle3_jax.data.template_masks import Example
from eagle3_jax.packing import lay_out, pack


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """R rows of T tokens, int32 [R, T] each. Padding is what has segment 0, whatever its id: a real end-of-sequence token may equal it."""

    ids: np.ndarray
    response: np.ndarray
    segments: np.ndarray
    positions: np.ndarray

    @property
    def fill(self) -> float:
        """Share of the slots that hold a token."""
        return float(np.count_nonzero(self.segments) / self.segments.size) if self.segments.size else 0.0


def plan_rows(lengths: Sequence[int], length: int, open_rows: int = 64) -> list[list[int]]:
    """Indices of the examples of each row, every example in exactly one row, ascending within it. Deterministic.

    Raises ValueError for an example longer than `length` tokens (cut examples beforehand).
    """
    return pack([(int(n),) for n in lengths], (length,), open_rows)


def fill_rows(examples: Sequence[Example], plan: Sequence[Sequence[int]], length: int, pad_id: int = 0) -> Rows:
    """The rows of `plan` (or some of them) as arrays."""
    shape = (len(plan), length)
    rows = Rows(np.full(shape, pad_id, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32))
    for r, members in enumerate(plan):
        chosen = [examples[i] for i in members]
        rows.segments[r], rows.positions[r], places = lay_out([len(example) for example in chosen], length)
        for example, place in zip(chosen, places, strict=True):
            rows.ids[r, place], rows.response[r, place] = example.ids, example.response
    return rows


def pack_examples(examples: Sequence[Example], length: int, pad_id: int = 0) -> Rows:
    """All examples in rows of `length` tokens: `plan_rows`, then `fill_rows`."""
    return fill_rows(examples, plan_rows([len(example) for example in examples], length), length, pad_id)
