"""Encoded examples on disk: one folder of flat arrays, opened as memory maps.

    ids.npy       int32 [n]      all examples one behind the other
    response.npy  int32 [n]      0 for context, r for the r-th answer of its example
    offsets.npy   int64 [E+1]    example e is offsets[e]:offsets[e+1]
    manifest.json                format, counts, where the data came from, tokenizer, chat template hash, limits

The folder appears under its name only when complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.data.sources import DataError
from eagle3_jax.data.template_masks import Example

FORMAT = 1
_MANIFEST = "manifest.json"
_ARRAYS = {"ids": np.int32, "response": np.int32, "offsets": np.int64}


class PreparedData:
    """A sequence of examples backed by memory maps. `ids` and `response` int32 [n] and `offsets` int64 [E+1] are the flat arrays."""

    def __init__(self, ids: np.ndarray, response: np.ndarray, offsets: np.ndarray, about: dict[str, Any]):
        self.ids, self.response, self.offsets, self.about = ids, response, offsets, about

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        index %= len(self)
        where = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Example(self.ids[where], self.response[where])

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))


def check_output(folder: str | Path, overwrite: bool = False) -> Path:
    """The folder to write, checked before any work. Raises DataError when it exists (unless `overwrite` and it is prepared data)."""
    folder = Path(folder)
    if folder.exists():
        if not (folder / _MANIFEST).is_file():
            raise DataError(f"{folder}: exists and is not prepared data; name another output")
        if not overwrite:
            raise DataError(f"{folder}: exists; name another output, or allow overwriting")
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def save_prepared(folder: str | Path, examples: Sequence[Example], about: dict[str, Any], *, overwrite: bool = False) -> None:
    """Writes the folder: under a temporary name beside it first, so that it is complete or absent. `about` goes into the manifest."""
    folder = check_output(folder, overwrite)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        lengths = [len(example) for example in examples]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        for name in ("ids", "response"):
            array = np.lib.format.open_memmap(temporary / f"{name}.npy", "w+", np.int32, (int(offsets[-1]),))
            for example, start, stop in zip(examples, offsets[:-1], offsets[1:], strict=True):
                array[start:stop] = getattr(example, name)
            array.flush()
        np.save(temporary / "offsets.npy", offsets)
        manifest = {"format": FORMAT, "examples": len(examples), "tokens": int(offsets[-1]), **about}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
        if folder.exists():
            old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
            folder.rename(old)
            temporary.rename(folder)
            shutil.rmtree(old)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_prepared(folder: str | Path) -> PreparedData:
    """Opens a folder written by `save_prepared`. Raises DataError naming the file that is missing or does not fit the others."""
    folder = Path(folder)
    try:
        about = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except OSError:
        raise DataError(f"{folder}: not prepared data (no {_MANIFEST} in it)") from None
    except ValueError as error:
        raise DataError(f"{folder / _MANIFEST}: not valid JSON ({error})") from None
    if about.get("format") != FORMAT:
        raise DataError(f"{folder / _MANIFEST}: format {about.get('format')!r}, this version reads {FORMAT}; prepare the data again")
    arrays = {}
    for name, dtype in _ARRAYS.items():
        file = folder / f"{name}.npy"
        try:
            arrays[name] = np.load(file, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{file}: missing or damaged ({error})") from None
        expected = about["examples"] + 1 if name == "offsets" else about["tokens"]
        if arrays[name].dtype != dtype or arrays[name].shape != (expected,):
            raise DataError(f"{file}: {arrays[name].dtype}{list(arrays[name].shape)}, the manifest says {np.dtype(dtype)}[{expected}]")
    return PreparedData(**arrays, about=about)
