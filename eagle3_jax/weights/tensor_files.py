"""The tensor files of a Hugging Face folder: safetensors or PyTorch's, one file or shards with an index, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import DuplicateKeyError, read_json, unique_keys
from eagle3_jax.weights.table import WeightsError
from eagle3_jax.weights.torch_file import TorchFile

SINGLE = "model.safetensors"
# In the order of preference: (a single file, the index of shards).
LAYOUTS = ((SINGLE, f"{SINGLE}.index.json"), ("pytorch_model.bin", "pytorch_model.bin.index.json"))
# Checked by name: numpy would hand out the bytes of a float8 checkpoint, whose scales are missing, without a word.
MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""
STORED = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}


class TensorFile(Protocol):
    """One file of named tensors."""

    def keys(self) -> Iterable[str]:
        """The tensors' names."""
        ...

    def read(self, key: str) -> np.ndarray:
        """One tensor as a fresh array of its stored dtype."""
        ...


class SafetensorsFile:
    """One safetensors file; only its header is read until a tensor is asked for."""

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        self.path = path
        _refuse_duplicates(path)
        try:
            self._handle: Any = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: not a safetensors file, or a truncated one ({error})") from error

    def keys(self) -> list[str]:
        """The tensors' names."""
        return list(self._handle.keys())

    def read(self, key: str) -> np.ndarray:
        """One tensor as a fresh array of its stored dtype; WeightsError names an unsupported one."""
        stored = self._handle.get_slice(key).get_dtype()
        if stored not in STORED:
            raise WeightsError(f"{self.path}: tensor {key!r} has dtype {stored}, which is not supported")
        try:
            array = self._handle.get_tensor(key)
        except Exception as error:  # The reader's own class, or numpy's for a dtype it lacks.
            raise WeightsError(f"{self.path}: tensor {key!r} cannot be read ({error})") from error
        return array.view(jnp.bfloat16) if stored == "BF16" else array


def _refuse_duplicates(path: Path) -> None:
    """Raises WeightsError where the header names a tensor twice, of which a reader would silently take one."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        # A wrong size is the reader's to report.
        header = file.read(size) if size <= min(MAX_HEADER, path.stat().st_size) else b"{}"
    try:
        json.loads(header, object_pairs_hook=unique_keys)
    except DuplicateKeyError as error:
        raise WeightsError(f"{path}: tensor {error.args[0]!r} is there twice") from None
    except ValueError:
        pass


class TensorFiles:
    """Tensors by name, spread over one or more files; `files` maps each tensor to its file.

    Files in the folder that the index does not name are left alone.
    Raises WeightsError naming a missing, damaged or truncated file, a tensor its shard lacks, or an unsupported dtype.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[Path, TensorFile] = {}
        for single, index in LAYOUTS:
            if (folder / single).is_file():
                path = folder / single
                self.files = dict.fromkeys(self._file(path).keys(), path)
                return
            if (folder / index).is_file():
                self.files = self._from_index(folder / index)
                return
        raise WeightsError(f"{folder}: neither {' nor '.join(name for layout in LAYOUTS for name in layout)} is there")

    def where(self, key: str) -> str:
        """The file that holds a tensor, for messages."""
        return str(self.files[key])

    def read(self, key: str) -> np.ndarray:
        """One tensor as a fresh numpy array of its stored dtype (bfloat16 included)."""
        return self._file(self.files[key]).read(key)

    def _from_index(self, index: Path) -> dict[str, Path]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise WeightsError(f"{index}: no weight_map")
        for name in weight_map.values():
            if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
                raise WeightsError(f"{index}: {name!r} is not the name of a file in the same folder; refused")
        files = {str(key): self.folder / name for key, name in weight_map.items()}
        shards = sorted(set(files.values()))
        for path in shards:
            if not path.is_file():
                raise WeightsError(f"{path}: the shard is missing; {index.name} names it")
        present = {path: set(self._file(path).keys()) for path in shards}
        for key, path in files.items():
            if key not in present[path]:
                raise WeightsError(f"{path}: tensor {key!r} is missing; {index.name} says it is here")
        for path in shards:
            for key in present[path]:
                # A tensor that the index forgets is there all the same: the table decides whether it belongs to the model.
                if files.setdefault(key, path) != path:
                    raise WeightsError(f"{path}: tensor {key!r} is in {files[key].name} too; {index.name} says it is there only")
        return files

    def _file(self, path: Path) -> TensorFile:
        if path not in self._open:
            self._open[path] = SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)
        return self._open[path]
