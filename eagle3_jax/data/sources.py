"""Where raw records come from: files (JSONL or one JSON list, plain or gzip; Parquet), data sets on the Hugging Face hub, named presets."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast


class DataError(ValueError):
    """Bad training data; the message names the file and line, or the key, and what to do."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """A data set on the hub, its split, and the format of its records."""

    dataset: str
    split: str
    format: str


PRESETS = {
    "sharegpt": Preset("Aeala/ShareGPT_Vicuna_unfiltered", "train", "conversations"),
    "ultrachat-200k": Preset("HuggingFaceH4/ultrachat_200k", "train_sft", "messages"),
    "openthoughts": Preset("open-thoughts/OpenThoughts-114k", "train", "conversations"),
}
HUB = "hf:"
_INSTALL = "install it with: pip install 'eagle3-jax[data]'"

Record = tuple[str, Any]


def read_records(
    source: str | Path, *, split: str | None = None, on_bad_line: Callable[[DataError], None] | None = None
) -> Iterator[Record]:
    """Yields (where, record) for every record of `source`, in order; `where` names file and line for messages to a person.

    source: a file, the name of a preset (`PRESETS`), or "hf:OWNER/NAME" or "hf:OWNER/NAME/CONFIGURATION" for a data set on the hub
    (`split` chooses its part, "train" unless given). on_bad_line: called with the error of each JSONL line that is not JSON, which is then
    passed over; None raises it.
    Raises DataError for a missing, damaged or unreadable source.
    """
    name = str(source)
    if Path(source).is_file():
        yield from _read_file(Path(source), on_bad_line)
    elif name in PRESETS:
        yield from _read_hub(PRESETS[name].dataset, split or PRESETS[name].split)
    elif name.startswith(HUB):
        yield from _read_hub(name.removeprefix(HUB), split or "train")
    else:
        raise DataError(f"{name}: no such file, and not a preset ({', '.join(PRESETS)}); name a data set on the hub as {HUB}OWNER/NAME")


def preset_format(source: str | Path) -> str | None:
    """The format of a preset's records; None for anything else."""
    return PRESETS[str(source)].format if str(source) in PRESETS and not Path(source).is_file() else None


def _read_file(path: Path, on_bad_line: Callable[[DataError], None] | None) -> Iterator[Record]:
    """The kind of a file is told by its first bytes, not by its name."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"PAR1":
        yield from _read_parquet(path)
        return
    try:
        with gzip.open(path, "rb") if magic[:2] == b"\x1f\x8b" else path.open("rb") as opened:
            file = cast(BinaryIO, opened)
            first = next((line for line in file if line.strip()), b"")
            file.seek(0)
            if first.lstrip().startswith(b"["):
                yield from _read_list(path, file)
            else:
                yield from _read_lines(path, file, on_bad_line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: the gzip file is damaged or truncated ({error})") from None


def _read_lines(path: Path, file: BinaryIO, on_bad_line: Callable[[DataError], None] | None) -> Iterator[Record]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            bad = DataError(f"{path}:{number}: not valid JSON ({error})")
            if on_bad_line is None:
                raise bad from None
            on_bad_line(bad)
            continue
        yield f"{path}:{number}", record


def _read_list(path: Path, file: BinaryIO) -> Iterator[Record]:
    try:
        records = json.load(file)
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}); a file that begins with '[' must be one list of records") from None
    for number, record in enumerate(records):
        yield f"{path}[{number}]", record


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException  # pyright: ignore[reportMissingImports]
        from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(f"{path}: Parquet files need pyarrow; {_INSTALL}") from None
    try:
        with ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    yield f"{path}[{number}]", record
                    number += 1
    except ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file ({error})") from None


def _read_hub(name: str, split: str) -> Iterator[Record]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(f"{name}: data sets on the hub need the package datasets; {_INSTALL}") from None
    owner_and_name, config = "/".join(name.split("/")[:2]), name.split("/")[2:]
    try:
        records = load_dataset(owner_and_name, *config, split=split)
    except Exception as error:  # the package has no common base for "no such data set", "no such split" and "no network"
        raise DataError(f"{name}, split {split!r}: cannot be loaded from the hub ({error})") from error
    for number, record in enumerate(records):
        yield f"{name}[{number}]", record
