"""A benchmark's samples on disk as they are made, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.bench.benchmark import Sample
from eagle3_jax.journal import Journal


class SampleJournal:
    """(unit, sample) pairs in a `Journal`; a unit is a name such as "mt_bench, T=0". `samples`: those of the run so far, by unit."""

    def __init__(self, path: str | Path, identity: Mapping[str, Any], resume: bool):
        """Takes over the samples of the run in `path` (with ".part" behind it) when `resume` is set, else starts anew.

        Raises JournalError, a ValueError, naming what differs when they belong to another run.
        """
        path = Path(path)
        if not resume:
            path.with_name(path.name + ".part").unlink(missing_ok=True)
        self._journal = Journal(path, identity, resume=True)
        self.samples: dict[str, list[Sample]] = {}
        for _, kept in self._journal.results():
            self.samples.setdefault(kept["unit"], []).append(Sample(**kept["sample"]))
        self._next = len(self._journal.found)

    def add(self, unit: str, sample: Sample) -> None:
        """Keeps a sample."""
        self._journal.append({self._next: {"unit": unit, "sample": dataclasses.asdict(sample)}})
        self._next += 1

    def close(self) -> None:
        """Lets go of the file; nothing is lost."""
        self._journal.close()

    def finish(self) -> None:
        """Removes the file: all it held is in the results."""
        self._journal.discard()
