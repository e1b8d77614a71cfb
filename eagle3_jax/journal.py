"""A benchmark's samples on disk as they are made, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.benchmark import Sample


class Journal:
    """JSON lines: what the run is, then (unit, sample) pairs. A unit is a name such as "mt_bench, T=0".

    An unfinished last line is cut off.
    """

    def __init__(self, path: str | Path, identity: Mapping[str, Any], resume: bool):
        """Takes over the samples of the run in `path` when `resume` is set, else starts anew.

        Raises ValueError naming what differs when the file belongs to another run.
        """
        self.path = Path(path)
        self.samples: dict[str, list[Sample]] = {}
        identity = json.loads(json.dumps(identity))
        lines = [json.dumps({"run": identity})]
        if resume and self.path.is_file():
            whole = self.path.read_text(encoding="utf-8").split("\n")[:-1]
            head = json.loads(whole[0])["run"] if whole else identity
            different = sorted(key for key in identity.keys() | head.keys() if identity.get(key) != head.get(key))
            names = ", ".join(different)
            if different:
                raise ValueError(f"{path}: holds a run with other arguments ({names}); name another --out, or leave out --resume")
            for line in whole[1:]:
                record = json.loads(line)
                self.samples.setdefault(record["unit"], []).append(Sample(**record["sample"]))
            lines = whole or lines
        self._file = self.path.open("w", encoding="utf-8")
        self._file.write("".join(f"{line}\n" for line in lines))
        self._file.flush()

    def add(self, unit: str, sample: Sample) -> None:
        """Keeps a sample."""
        self._file.write(json.dumps({"unit": unit, "sample": dataclasses.asdict(sample)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def finish(self) -> None:
        """Removes the file: all it held is in the results."""
        self.close()
        self.path.unlink(missing_ok=True)
