"""What a `path_or_id` stands for: a built-in name, a file or folder, or a repository of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from eagle3_jax.weights.table import WeightsError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILE = re.compile(rf"({HUB_ID.pattern})/([\w.-]+\.gguf)")


def locate(
    path_or_id: str | os.PathLike[str],
    builtin: Mapping[str, Callable[[], Path]],
    patterns: Sequence[str],
    otherwise: Sequence[str] = (),
) -> Path:
    """A local file or folder. A built-in name wins over a folder of that name (write `./name` for the folder).

    From a hub repository the files at its top that match `patterns` are downloaded, and those that match `otherwise`
    where there is none of the last pattern's; from "owner/name/FILE.gguf" that file alone. Raises WeightsError when nothing is found.
    """
    if isinstance(path_or_id, str) and path_or_id in builtin:
        return builtin[path_or_id]()
    path = Path(path_or_id).expanduser()
    if path.exists():
        return path
    if isinstance(path_or_id, str) and (file := HUB_FILE.fullmatch(path_or_id)):
        return _download(file[1], [file[2]]) / file[2]
    if isinstance(path_or_id, str) and HUB_ID.fullmatch(path_or_id) and not path_or_id.endswith(".gguf"):
        folder = _download(path_or_id, patterns)
        return _download(path_or_id, [*patterns, *otherwise]) if otherwise and not any(folder.glob(patterns[-1])) else folder
    raise WeightsError(f"{path_or_id}: no such file or folder, and not a built-in name ({', '.join(builtin)})")


def _download(repository: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        # consolidated*: the same weights once more, in Mistral's own format.
        return Path(snapshot_download(repository, allow_patterns=list(patterns), ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:  # Offline, unknown repository, refused access: the hub's client has a class for each.
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(f"{repository}: no such folder here, and the Hugging Face hub did not give it ({first})") from error
