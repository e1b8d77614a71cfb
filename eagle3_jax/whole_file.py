"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A name beside `path`, with its suffix, to write under: it becomes `path` when the block ends, and is gone when the block fails."""
    target = Path(path)
    part = target.with_name(f".{target.stem}.{os.getpid()}.part{target.suffix}")
    try:
        yield part
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Writes JSON, whole or not at all. Raises ValueError for a number that JSON does not know, TypeError for what is none of its types."""
    with whole_file(path) as part:
        part.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
