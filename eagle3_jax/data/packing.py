"""Examples of any length in rows of one static length, so that a jitted pass compiles once.

A row holds whole examples one behind the other. Segment ids tell them apart (1, 2, ...; 0 is padding), positions restart in each.
Whoever uses a row must let nothing cross a segment: attention, the shifted inputs and targets of every training-time-test step, the mask.
Response numbers restart in each segment too: an answer is named by (segment, response).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np


class TokenExample(Protocol):
    """One conversation as ids int32 [n]; response[t] is 0 for prompt and template, r when token t belongs to the r-th answer."""

    @property
    def ids(self) -> np.ndarray: ...
    @property
    def response(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """R rows of T tokens, int32 [R, T] each, and the slice of each row's examples.

    Padding is what has segment 0, whatever its id: a real end-of-sequence token may equal it.
    """

    ids: np.ndarray
    response: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    places: list[list[slice]]

    @property
    def fill(self) -> float:
        """Share of the slots that hold a token."""
        return float(np.count_nonzero(self.segments) / self.segments.size) if self.segments.size else 0.0


def pack(sizes: Sequence[tuple[int, ...]], limits: tuple[int, ...], open_rows: int = 64) -> list[list[int]]:
    """Plans rows that pass no limit: the item indices of each row, every item exactly once, ascending within a row.

    sizes: per item one number per limit (tokens, supervised slots, ...). Best fit over at most `open_rows` unfinished rows, in
    item order: deterministic, and an item stays near its neighbours in the order. Raises ValueError for an item that fits no row.
    """
    rows: list[list[int]] = []
    open_: list[tuple[int, np.ndarray]] = []
    bound = np.asarray(limits, np.int64)
    for item, size in enumerate(sizes):
        need = np.asarray(size, np.int64)
        if np.any(need > bound):
            raise ValueError(f"item {item} of size {tuple(size)} does not fit into a row of {tuple(limits)}")
        best, best_left = -1, None
        for slot, (_, left) in enumerate(open_):
            after = left - need
            if np.all(after >= 0) and (best_left is None or after[0] < best_left):
                best, best_left = slot, int(after[0])
        if best < 0:
            if len(open_) == open_rows:
                open_.pop(int(np.argmin([left[0] for _, left in open_])))
            rows.append([])
            open_.append((len(rows) - 1, bound.copy()))
            best = len(open_) - 1
        row, left = open_[best]
        rows[row].append(item)
        open_[best] = (row, left - need)
    return rows


def fill_rows(members: Sequence[Sequence[TokenExample]], length: int, rows: int | None = None, pad_id: int = 0) -> Rows:
    """The arrays of planned rows, from the examples of each; `rows` (unset: as many as planned) adds rows of padding.

    Raises ValueError when the examples of a row are longer than `length` tokens together.
    """
    shape = (len(members) if rows is None else rows, length)
    ids, (response, segments, positions) = np.full(shape, pad_id, np.int32), (np.zeros(shape, np.int32) for _ in range(3))
    places: list[list[slice]] = []
    for r, examples in enumerate(members):
        edges = np.cumsum([0, *(len(example.ids) for example in examples)]).tolist()
        if edges[-1] > length:
            raise ValueError(f"row {r}: {edges[-1]} tokens do not fit into a row of {length}")
        places.append([slice(start, stop) for start, stop in pairwise(edges)])
        for number, (example, place) in enumerate(zip(examples, places[r], strict=True), 1):
            ids[r, place], response[r, place], segments[r, place] = example.ids, example.response, number
            positions[r, place] = np.arange(len(example.ids), dtype=np.int32)
    return Rows(ids, response, segments, positions, places)
