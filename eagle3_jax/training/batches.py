"""Cached features, or token ids alone, to packed training batches, in an order that (seed, epoch, position) alone decides."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from eagle3_jax.data.order import order
from eagle3_jax.data.packing import fill_rows, pack
from eagle3_jax.training.features import CachedExample, Selection
from eagle3_jax.training.ttt import Batch, Recipe, scored


@dataclasses.dataclass(frozen=True)
class Cursor:
    """Where training stands in the data: the next batch of which epoch, and how many examples that epoch draws from."""

    epoch: int = 0
    batch: int = 0
    examples: int | None = None


class Examples(Protocol):
    """What batches are made of: so many examples are at hand, of so many in the end."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> CachedExample: ...
    @property
    def total(self) -> int: ...


class TokenExamples:
    """Examples without features, for a step in which the target itself runs."""

    def __init__(self, selection: Selection):
        self._examples = selection.examples

    def __len__(self) -> int:
        return len(self._examples)

    @property
    def total(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> CachedExample:
        return CachedExample(*self._examples[index])


def slot_count(recipe: Recipe, response: np.ndarray) -> int:
    """Slots of one example that the recipe scores at some step."""
    one = response[None]
    return int(scored(recipe, one, np.ones_like(one), np.ones_like(one, bool)).any(0).sum())


def make_batch(
    examples: Sequence[Sequence[CachedExample]], recipe: Recipe, rows: int, width: int, slots: int, like: CachedExample | None = None
) -> Batch:
    """A batch of numpy arrays from the examples of each row; missing rows are padding. Raises ValueError when a row is too long.

    Examples without features give a batch without them. like: an example to tell by where all these rows are padding.
    """
    some = like or next(e for row in examples for e in row)
    packed = fill_rows(examples, width, rows)
    at = np.full((rows, slots), -1, np.int32)
    known: dict[str, np.ndarray] = {}
    for name in ("features", "hidden", "argmax"):
        value = getattr(some, name)
        if value is not None:
            known[name] = np.full((rows, width, *value.shape[1:]), -1 if name == "argmax" else 0, value.dtype)
    for b, row in enumerate(examples):
        for example, place in zip(row, packed.places[b], strict=True):
            for name, into in known.items():
                into[b, place] = getattr(example, name)
    valid = packed.segments > 0
    for b, wanted in enumerate(scored(recipe, packed.response, packed.segments, valid).any(0)):
        index = np.flatnonzero(wanted)
        if len(index) > slots:
            raise ValueError(f"row {b} has {len(index)} scored slots, more than {slots}")
        at[b, slots - len(index) :] = index
    features, hidden, argmax = (known.get(name) for name in ("features", "hidden", "argmax"))
    return Batch(packed.ids, packed.positions, features, hidden, argmax, packed.response, packed.segments, valid, at)  # type: ignore[arg-type]


class BatchSource:
    """Batches of a feature cache (or of `TokenExamples`) for one recipe and one static shape.

    The first epoch follows the cache's own order and may run while the cache is still being written: it waits for the next shard.
    Every later epoch is a permutation of the examples by (seed, epoch). Rows are planned for a whole epoch (the first: for `window`
    examples at a time), so the batches of an epoch are a pure function of (seed, epoch, number of examples).
    """

    def __init__(
        self,
        open_cache: Callable[[], Examples],
        recipe: Recipe,
        *,
        seed: int,
        rows: int,
        width: int,
        slots: int,
        window: int = 128,
        limit: int | None = None,
        wait_seconds: float = 5.0,
        say: Callable[[str], None] = lambda line: None,
    ):
        self._open, self._recipe, self._seed = open_cache, recipe, seed
        self._rows, self._width, self._slots = rows, width, slots
        self._window, self._limit, self._wait, self._say = window, limit, wait_seconds, say
        self._cache = open_cache()
        self._sizes: list[tuple[int, int]] = []

    def _ready(self) -> int:
        return min(len(self._cache), self._limit or len(self._cache))

    @property
    def total(self) -> int:
        """Examples the finished cache will hold, or the limit."""
        return min(self._cache.total, self._limit or self._cache.total)

    def _size(self, index: int) -> tuple[int, int]:
        while len(self._sizes) <= index:
            example = self._cache[len(self._sizes)]
            self._sizes.append((len(example.ids), slot_count(self._recipe, example.response)))
        return self._sizes[index]

    def _fits(self, index: int) -> bool:
        tokens, slots = self._size(index)
        return 0 < slots <= self._slots and tokens <= self._width

    @property
    def left_out(self) -> int:
        """Examples at hand that are in no batch: without a scored slot, or with more tokens or slots than a row holds."""
        return sum(not self._fits(i) for i in range(self._ready()))

    def _batches(self, examples: Sequence[int]) -> list[list[list[int]]]:
        usable = [i for i in examples if self._fits(i)]
        rows = [[usable[j] for j in row] for row in pack([self._size(i) for i in usable], (self._width, self._slots))]
        return [rows[i : i + self._rows] for i in range(0, len(rows), self._rows)]

    def _first_epoch(self) -> Iterator[list[list[int]]]:
        for begin in range(0, self.total, self._window):
            end = min(begin + self._window, self.total)
            while self._ready() < end:
                self._say(f"waiting for the feature cache: {self._ready()} of {self.total} examples")
                time.sleep(self._wait)
                self._cache = self._open()
            yield from self._batches(range(begin, end))

    def plan(self, cursor: Cursor) -> Iterator[tuple[list[list[int]], Cursor]]:
        """(example indices of each row of a batch, the cursor behind it), endlessly from `cursor` on."""
        epoch, skip, count = cursor.epoch, cursor.batch, cursor.examples
        while True:
            if epoch == 0:
                batches: Iterator[list[list[int]]] = self._first_epoch()
            else:
                count = count or self._ready()
                batches = iter(self._batches([int(i) for i in order(self._seed, epoch, count)]))
            produced = 0
            for number, rows in enumerate(batches):
                produced += 1
                if number >= skip:
                    yield rows, Cursor(epoch, number + 1, count)
            if not produced:
                raise ValueError("no example of the feature cache has a scored slot and fits into a row")
            epoch, skip, count = epoch + 1, 0, None

    def build(self, rows: list[list[int]], own: Sequence[int] | None = None) -> Batch:
        """The arrays of a planned batch; `own` names the rows to read, None: all."""
        numbers = range(self._rows) if own is None else own
        chosen = [[self._cache[i] for i in rows[b]] if b < len(rows) else [] for b in numbers]
        return make_batch(chosen, self._recipe, len(numbers), self._width, self._slots, like=self._cache[rows[0][0]])

    def tokens(self, rows: list[list[int]]) -> int:
        """Tokens of a planned batch, padding not counted."""
        return sum(self._size(i)[0] for row in rows for i in row)

    def once(self) -> Iterator[Batch]:
        """Every example once, in the cache's order."""
        for rows in self._batches(range(self._ready())):
            yield self.build(rows)
