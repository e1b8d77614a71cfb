"""The order of training: a pure function of (seed, epoch, position).

Nothing is remembered but the position, so a run resumes exactly where it stopped, on any number of processes. Every process computes the
same permutation and takes its share by slicing; no files are written and nothing is exchanged.

Why not Grain: it solves reading and transforming records in worker processes, and saves the state of that machinery in checkpoints. Here
the records are token arrays in memory maps, which need neither; what is left of it is this permutation, and one integer to save.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=2)
def order(seed: int, epoch: int, n: int) -> np.ndarray:
    """A permutation of 0..n-1, int64 [n], read-only. The same for the same arguments on every machine and NumPy version.

    Sorts raw output of the Philox generator keyed by (seed, epoch): NumPy fixes that stream for good, its `permutation` it does not.
    """
    if seed < 0 or epoch < 0 or n < 0:
        raise ValueError(f"seed {seed}, epoch {epoch} and n {n} must not be negative")
    bits = np.random.Philox(key=[seed, epoch]).random_raw(n)
    permutation = np.argsort(bits, kind="stable").astype(np.int64)
    permutation.flags.writeable = False
    return permutation


def process_share(indices: np.ndarray, process: int, count: int) -> np.ndarray:
    """Every count-th index from `process` on: what process `process` of `count` reads of them."""
    if not 0 <= process < count:
        raise ValueError(f"process {process} of {count}: must lie in 0..{count - 1}")
    return indices[process::count]


@dataclasses.dataclass(frozen=True)
class Stream:
    """A place in the endless stream of epochs: items handed out so far, over all processes. Two integers are all there is to save."""

    seed: int
    position: int = 0

    def take(self, n: int, count: int) -> tuple[np.ndarray, Stream]:
        """The next `count` indices into n items, int64 [count], and the cursor behind them. Goes on into the next epoch when one ends."""
        if n < 1 or count < 0:
            raise ValueError(f"cannot take {count} of {n} items")
        positions = np.arange(self.position, self.position + count)
        epochs, places = np.divmod(positions, n)
        indices = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = order(self.seed, int(epoch), n)[places[here]]
        return indices, Stream(self.seed, self.position + count)
