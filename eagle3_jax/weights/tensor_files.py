"""The tensor files of a Hugging Face folder: one safetensors file or shards with an index, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import read_json
from eagle3_jax.weights.table import WeightsError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Checked by name: numpy would hand out the bytes of a float8 checkpoint, whose scales are missing, without a word.
STORED = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}


class TensorFiles:
    """Tensors by name, spread over one or more safetensors files. Only headers are read until a tensor is asked for.

    `files` maps each tensor to its file. Files in the folder that the index does not name are left alone.
    Raises WeightsError naming a missing, damaged or truncated file, a tensor its shard lacks, or an unsupported dtype.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[Path, Any] = {}
        if (folder / SINGLE).is_file():
            path = folder / SINGLE
            self.files = dict.fromkeys(self._handle(path).keys(), path)
        elif (folder / INDEX).is_file():
            self.files = self._from_index(folder / INDEX)
        else:
            raise WeightsError(f"{folder}: neither {SINGLE} nor {INDEX} is there")

    def where(self, key: str) -> str:
        """The file that holds a tensor, for messages."""
        return str(self.files[key])

    def read(self, key: str) -> np.ndarray:
        """One tensor as a fresh numpy array of its stored dtype (bfloat16 included)."""
        path = self.files[key]
        file = self._handle(path)
        stored = file.get_slice(key).get_dtype()
        if stored not in STORED:
            raise WeightsError(f"{path}: tensor {key!r} has dtype {stored}, which is not supported")
        array = file.get_tensor(key)
        return array.view(jnp.bfloat16) if stored == "BF16" else array

    def _from_index(self, index: Path) -> dict[str, Path]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise WeightsError(f"{index}: no weight_map")
        files = {str(key): self.folder / str(name) for key, name in weight_map.items()}
        for path in sorted(set(files.values())):
            if not path.is_file():
                raise WeightsError(f"{path}: the shard is missing; {index.name} names it")
        for key, path in files.items():
            if key not in self._handle(path).keys():  # noqa: SIM118 (the handle is not a mapping)
                raise WeightsError(f"{path}: tensor {key!r} is missing; {index.name} says it is here")
        return files

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[path] = safe_open(path, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path}: not a safetensors file, or a truncated one ({error})") from error
        return self._open[path]
