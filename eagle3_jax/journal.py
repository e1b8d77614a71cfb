"""Results of a long run, kept line by line, so that a kill at any moment loses none that was reported and doubles none.

While the run goes on they stand in FILE.part: a first line that says which run it is, then one line per result, in the order they came,
each batch of them on the disk before the next. At the end they are written to FILE in the order of their numbers, whole or not at all:
the finished file does not show how often the run was interrupted.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.whole_file import whole_file


class JournalError(ValueError):
    """A journal that cannot be used or written; the message names the file and what to do."""


class Journal:
    """The results of one run, by number.

    about: what decides the results, as JSON knows it. resume: go on with FILE.part where it exists; `found`: the numbers it holds.
    Raises JournalError when FILE exists, when FILE.part exists and is not to be resumed, belongs to another run (each difference is named),
    is damaged, or is being written by another process.
    """

    def __init__(self, file: str | Path, about: Mapping[str, Any], *, resume: bool = False):
        self.file = Path(file)
        self.part = self.file.with_name(self.file.name + ".part")
        if self.file.exists():
            raise JournalError(f"{self.file}: exists; name another output")
        if self.part.exists() and not resume:
            raise JournalError(f"{self.part}: an unfinished run is there; continue it with --resume, or delete the file")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.found: set[int] = set()
        stated: dict[str, Any] = json.loads(json.dumps(about))
        if not self.part.exists():
            self._create(stated)
        # Unbuffered: after a write that failed, nothing of it waits to be written later.
        self._out = self.part.open("r+b", buffering=0)
        try:
            fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._out.close()
            raise JournalError(f"{self.part}: another process is writing it") from None
        try:
            self._read(stated)
        except BaseException:
            self._out.close()
            raise

    def append(self, results: Mapping[int, Any]) -> None:
        """Puts results on the disk. Raises JournalError when that fails (a full disk, say); what was there before is then intact."""
        if not results:
            return
        rest = b"".join(_line({"number": number, "result": result}) for number, result in results.items())
        before = self._out.tell()
        try:
            while rest:
                rest = rest[self._out.write(rest) :]
            os.fsync(self._out.fileno())
        except OSError as error:
            # Without this the next line would stand behind half a line.
            self._out.truncate(before)
            self._out.seek(before)
            raise JournalError(
                f"{self.part}: cannot be written ({error}); what was written before is intact: go on with --resume"
            ) from error

    def results(self) -> Iterator[tuple[int, Any]]:
        """(number, result) of all that is kept, by number."""
        with self.part.open("rb") as file:
            place, places = len(file.readline()), {}
            for line in file:
                places[json.loads(line)["number"]] = place
                place += len(line)
            for number in sorted(places):
                file.seek(places[number])
                yield number, json.loads(file.readline())["result"]

    def finish(self, values: Iterable[Any]) -> None:
        """Writes FILE, one value per line (compressed when its name ends in .gz), and removes FILE.part."""
        with whole_file(self.file) as whole, whole.open("wb") as raw:
            # No name and no time inside: the same values give the same bytes.
            out = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if self.file.suffix == ".gz" else raw
            for value in values:
                out.write(_line(value))
            if out is not raw:
                out.close()
            raw.flush()
            os.fsync(raw.fileno())
        _sync_folder(self.file.parent)
        self.part.unlink()
        self.close()

    def discard(self) -> None:
        """Removes FILE.part: whatever it held is kept elsewhere."""
        self.part.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Lets go of the file; nothing is lost."""
        self._out.close()

    def _create(self, about: dict[str, Any]) -> None:
        """FILE.part appears with its first line complete."""
        with whole_file(self.part) as whole, whole.open("wb") as out:
            out.write(_line({"about": about}))
            out.flush()
            os.fsync(out.fileno())
        _sync_folder(self.part.parent)

    def _read(self, about: dict[str, Any]) -> None:
        """Checks the first line, collects the results, and cuts off a line that was being written when the run was killed."""
        end = 0
        for number, line in enumerate(self._lines(), 1):
            if not line.endswith(b"\n"):
                break
            try:
                value = json.loads(line)
                if number == 1:
                    self._check(value["about"], about)
                else:
                    self.found.add(value["number"])
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, JournalError):
                    raise
                raise JournalError(f"{self.part}:{number}: damaged ({error}); delete the file and start again") from None
            end += len(line)
        if end == 0:
            raise JournalError(f"{self.part}: holds no run; delete the file and start again")
        self._out.seek(end)
        self._out.truncate(end)

    def _lines(self) -> Iterator[bytes]:
        with self.part.open("rb") as file:
            yield from file

    def _check(self, found: Any, wanted: dict[str, Any]) -> None:
        names = sorted(found.keys() | wanted.keys())
        different = [
            f"{name}: there {found.get(name)!r}, now {wanted.get(name)!r}" for name in names if found.get(name) != wanted.get(name)
        ]
        if different:
            raise JournalError(f"{self.part}: belongs to another run; {'; '.join(different)}")


def finished(file: str | Path) -> bool:
    """Whether the run's FILE is there, whole. (A kill may have left its FILE.part beside it, which is removed.)"""
    file = Path(file)
    if file.exists():
        file.with_name(file.name + ".part").unlink(missing_ok=True)
    return file.exists()


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _sync_folder(folder: Path) -> None:
    """Makes a new name in the folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
