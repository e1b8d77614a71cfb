"""Where training's records are kept: JSON lines always, TensorBoard and Weights & Biases where they are asked for."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from eagle3_jax.whole_file import whole_file


class Writer(Protocol):
    """Takes one record at a time: "step", and numbers, lists of numbers (one per unrolled step) or mappings of those."""

    def write(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(tag, number) of everything in a record but its step: "accuracy/0", "held_out/loss/2", ..."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (list, tuple)):
            yield from ((f"{prefix}{key}/{i}", float(x)) for i, x in enumerate(value))
        elif value is not None and key != "step":
            yield f"{prefix}{key}", float(value)


class JsonLines:
    """One JSON object per line. resume_at: an earlier run's records up to that step are kept, later ones dropped (they come again)."""

    def __init__(self, path: str | Path, resume_at: int | None = None):
        self._path = Path(path)
        if resume_at is not None and self._path.exists():
            _cut(self._path, resume_at)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115
        self._failed = False

    def write(self, record: Mapping[str, Any]) -> None:
        """A disk that is full costs lines of the log, not the run; it is said once."""
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            if not self._failed:
                print(f"{self._path}: records are being lost ({error})", file=sys.stderr, flush=True)
            self._failed = True

    def close(self) -> None:
        try:
            self._file.close()
        except OSError:
            # What could not be flushed was reported when it was written.
            self._file.detach() if not self._file.closed else None


def _cut(path: Path, step: int) -> None:
    """Drops the records behind `step`, and a line that a killed run left unfinished."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record.get("step", 0) <= step:
            kept.append(line + "\n")
    with whole_file(path) as part:
        part.write_text("".join(kept), encoding="utf-8")


class TensorBoard:
    """Event files in `folder`, one scalar series per number. Raises ValueError when the package is missing."""

    def __init__(self, folder: str | Path):
        try:
            from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportMissingImports]
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportMissingImports]
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError("TensorBoard is not installed: pip install 'eagle3-jax[tensorboard]'") from None
        self._event, self._summary, self._writer = Event, Summary, EventFileWriter(str(folder))

    def write(self, record: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record)]
        self._writer.add_event(self._event(step=int(record["step"]), wall_time=time.time(), summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of `project` with `config` as its settings. Raises ValueError when the package is missing."""

    def __init__(self, project: str, config: Mapping[str, Any], folder: str | Path):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError("Weights & Biases is not installed: pip install 'eagle3-jax[wandb]'") from None
        self._run = wandb.init(project=project, config=dict(config), dir=str(folder))

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(record)), step=int(record["step"]))

    def close(self) -> None:
        self._run.finish()
