"""PyTorch checkpoints (`pytorch_model.bin`, the zip format since torch 1.6) read without torch and without running what they contain.

Such a file is a zip archive: `data.pkl` describes the tensors, `data/KEY` holds the bytes of each storage. Unpickling is confined to the
handful of names that a state dict of plain tensors needs; anything else is refused.
"""

from __future__ import annotations

import collections
import dataclasses
import pickle
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.weights.table import WeightsError

STORAGES: dict[str, np.dtype] = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(jnp.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `shape` and `strides` count elements, from `offset` in storage `key`."""

    dtype: np.dtype
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TorchFile:
    """Tensors of a `.bin` file by name; the bytes of one are read when it is asked for. Raises WeightsError naming the file."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
            names = self._archive.namelist()
            if any(info.compress_type != zipfile.ZIP_STORED for info in self._archive.infolist()):
                raise WeightsError("holds compressed entries, which PyTorch never writes: refused")
            self._root = next(name for name in names if name.endswith("/data.pkl")).removesuffix("data.pkl")
            with self._archive.open(f"{self._root}data.pkl") as file:
                state = _Unpickler(file).load()
            if f"{self._root}byteorder" in names and self._archive.read(f"{self._root}byteorder") != b"little":
                raise WeightsError("written on a big-endian machine")
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from error
        except Exception as error:  # A pickle can fail in any way.
            raise WeightsError(
                f"{path}: not a PyTorch checkpoint, a truncated one, or one of before torch 1.6 ({type(error).__name__}: {error})"
            ) from error
        if not isinstance(state, dict) or not all(isinstance(tensor, StoredTensor) for tensor in state.values()):
            raise WeightsError(f"{path}: expected a state dict, tensors by name, and nothing else")
        self._tensors: dict[str, StoredTensor] = dict(state)

    def keys(self) -> list[str]:
        """The tensors' names."""
        return list(self._tensors)

    def read(self, key: str) -> np.ndarray:
        """One tensor as a fresh array of its stored dtype."""
        tensor = self._tensors[key]
        try:
            data = np.frombuffer(self._archive.read(f"{self._root}data/{tensor.key}"), tensor.dtype)
        except Exception as error:  # A missing storage, a bad checksum, a size that is no multiple of the element's.
            raise WeightsError(f"{self.path}: tensor {key!r} cannot be read ({error})") from error
        if tensor.offset < 0 or min(tensor.strides, default=0) < 0 or min(tensor.shape, default=0) < 0:
            raise WeightsError(f"{self.path}: tensor {key!r} has a negative offset, stride or size")
        last = tensor.offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
        if 0 in tensor.shape:
            return np.zeros(tensor.shape, tensor.dtype)
        if last >= data.size:
            raise WeightsError(f"{self.path}: tensor {key!r} reaches past its storage of {data.size} elements")
        strides = tuple(stride * data.itemsize for stride in tensor.strides)
        return np.array(np.lib.stride_tricks.as_strided(data[tensor.offset :], tensor.shape, strides))


class _Unpickler(pickle.Unpickler):
    """Knows tensors, parameters, storages and ordered dicts; refuses every other name a pickle may ask for."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *rest: tensor
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise WeightsError(f"its pickle asks for {module}.{name}, which a state dict of plain tensors does not need: refused")

    def persistent_load(self, pid: Any) -> tuple[np.dtype, str]:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise WeightsError(f"its pickle refers to {pid!r}, which is not a tensor's storage")
        return dtype, str(key)


def _rebuild_tensor(
    storage: tuple[np.dtype, str], offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *rest: Any
) -> StoredTensor:
    dtype, key = storage
    return StoredTensor(dtype, key, int(offset), tuple(shape), tuple(strides))
