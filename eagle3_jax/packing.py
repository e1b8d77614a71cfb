"""Packing of examples of any length into rows of one static shape, so that a jitted pass compiles once.

A row holds whole examples one behind the other; `segments` tells them apart and positions restart in each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pack(sizes: Sequence[tuple[int, ...]], limits: tuple[int, ...], open_rows: int = 64) -> list[list[int]]:
    """Places items into rows without passing any limit; returns the item indices of each row, every item exactly once.

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


def lay_out(lengths: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray, list[slice]]:
    """(segments int32 [T], positions int32 [T], the slice of each example) of one row. Segment ids start at 1; 0 is padding."""
    segments, positions, slices, start = np.zeros(width, np.int32), np.zeros(width, np.int32), [], 0
    for number, length in enumerate(lengths, start=1):
        where = slice(start, start + length)
        segments[where], positions[where] = number, np.arange(length, dtype=np.int32)
        slices.append(where)
        start += length
    if start > width:
        raise ValueError(f"{start} tokens do not fit into a row of {width}")
    return segments, positions, slices
