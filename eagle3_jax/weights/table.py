"""The converter's table: one row per tensor of a checkpoint, checked for shape and completeness, readable in both directions."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from eagle3_jax.int8 import Int8
from eagle3_jax.panels import in_plain
from eagle3_jax.params import fill, named_variables
from eagle3_jax.sharding import module_specs, warn_whole_heads

M = TypeVar("M", bound=nnx.Module)

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class WeightsError(ValueError):
    """Weights that cannot be used; the message names the file and the tensor."""


@dataclasses.dataclass(frozen=True)
class Row:
    """`key` is the tensor's name in the file, `path` the dotted path in our module; `transpose` turns [out, in] into [in, out].

    A tensor that is one part of a parameter names where it goes: `index` into the parameter without its input axis, and the
    `shape` of its output axes there.
    """

    key: str
    path: str
    transpose: bool = False
    index: tuple[Any, ...] | None = None
    shape: tuple[int, ...] = ()


def projection_rows(prefix: str, name: str, path: str, parts: Mapping[str, tuple[str, tuple, tuple[int, ...]]], bias: bool) -> list[Row]:
    """The weight of one projection, and its bias if it has one: `prefix`.weight and .bias to `path`.`name`, or to what it is part of."""
    kinds = (("weight", "", True), ("bias", "_bias", False)) if bias else (("weight", "", True),)
    if name not in parts:
        return [Row(f"{prefix}.{kind}", f"{path}.{name}{suffix}", transpose) for kind, suffix, transpose in kinds]
    whole, index, shape = parts[name]
    return [Row(f"{prefix}.{kind}", f"{path}.{whole}{suffix}", transpose, index, shape) for kind, suffix, transpose in kinds]


def compute_dtype(name: Any) -> np.dtype:
    """The numpy dtype of "float32" or "bfloat16"; any other name is a WeightsError."""
    text = name if isinstance(name, str) else jnp.dtype(name).name
    if text not in DTYPES:
        raise WeightsError(f"dtype {text!r} is not supported (supported: {', '.join(DTYPES)})")
    return np.dtype(DTYPES[text])


def check_keys(rows: Iterable[Row], present: Iterable[str], where: str, ignore: Callable[[str], bool] = lambda key: False) -> None:
    """Raises WeightsError unless the file holds exactly the table's tensors; `ignore` names keys that may be there for nothing."""
    wanted, found = {row.key for row in rows}, {key for key in present if not ignore(key)}
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if missing:
        raise WeightsError(f"{where}: tensor {missing[0]!r} is missing{_more(missing)}")
    if extra:
        raise WeightsError(f"{where}: tensor {extra[0]!r} is not part of this model{_more(extra)}; refusing to ignore it")


def read_rows(
    module: M,
    rows: Iterable[Row],
    read: Callable[[str], np.ndarray],
    dtype: np.dtype,
    where: Callable[[str], str],
    given: Mapping[str, jax.Array] | None = None,
    mesh: Mesh | None = None,
) -> M:
    """Fills an abstract `module`, one tensor in flight at a time.

    `read(key)` gives the file's array, `where(key)` the file's name for messages; `given` holds finished values by path.
    mesh: where every parameter goes as soon as it is read, each device's part by itself: the host never holds two of them.
    Raises WeightsError naming file and key for a shape that is not the module's or a dtype that is not floating point.
    """
    shapes = {path: tuple(variable.get_value().shape) for path, variable in named_variables(module)}
    values: dict[str, Any] = dict(given or {})
    specs = {} if mesh is None else module_specs(module, mesh)

    def finished(path: str, array: np.ndarray) -> jax.Array:
        if mesh is None:
            # np.array always copies: JAX may adopt the buffer, which must not be the mapped file.
            return jnp.asarray(array if array is values.get(path) else np.array(array, dtype=dtype, order="C"))
        sharding = NamedSharding(mesh, specs[path])
        return jax.make_array_from_callback(array.shape, sharding, lambda index: np.array(array[index], dtype=dtype, order="C"))

    table = list(rows)
    waiting = collections.Counter(row.path for row in table)
    for row in table:
        array = read(row.key)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise WeightsError(f"{where(row.key)}: tensor {row.key!r} has dtype {array.dtype}, expected a floating-point type")
        whole = shapes[row.path]
        inputs = whole[:1] if row.transpose else ()
        ours = whole if row.index is None else (*inputs, math.prod(row.shape))
        want = ours[::-1] if row.transpose else ours
        if tuple(array.shape) != want:
            raise WeightsError(f"{where(row.key)}: tensor {row.key!r} has shape {tuple(array.shape)}, expected {want}")
        array = array.T if row.transpose else array
        waiting[row.path] -= 1
        if row.index is None:
            values[row.path] = finished(row.path, array)
        else:
            buffer = values.setdefault(row.path, np.empty(whole, dtype))
            buffer[(slice(None),) * len(inputs) + row.index] = array.reshape(*inputs, *row.shape)
            if not waiting[row.path]:
                values[row.path] = finished(row.path, buffer)
            del buffer
        # Before the next one is read, or two would be alive.
        del array
    if mesh is not None:
        warn_whole_heads(module, mesh)
    return fill(module, values)


def write_rows(module: nnx.Module, rows: Iterable[Row], dtype: np.dtype) -> dict[str, np.ndarray]:
    """The file's tensors by key, in `dtype`: the inverse of `read_rows`. Raises WeightsError for one that is not finite in `dtype`."""
    values = {path: in_plain(variable.get_value()) for path, variable in named_variables(module)}
    tensors = {}
    for row in rows:
        if isinstance(values[row.path], Int8):
            raise WeightsError(f"tensor {row.key!r} is int8 in this model, and int8 weights are not saved; save the model it was made from")
        array = np.asarray(values[row.path])
        if row.index is not None:
            inputs = array.shape[:1] if row.transpose else ()
            array = array[(slice(None),) * len(inputs) + row.index].reshape(*inputs, -1)
        with np.errstate(over="ignore"):
            stored = np.array(array.T if row.transpose else array, dtype=dtype, order="C")
        if not np.isfinite(stored.astype(np.float32)).all():
            raise WeightsError(f"tensor {row.key!r} is not finite in {dtype.name}: not saved")
        tensors[row.key] = stored
    return tensors


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
