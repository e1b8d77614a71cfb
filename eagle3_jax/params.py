"""One definition per parameter: shape, initialiser and logical axes, held in Flax NNX variables.

Modules are built abstract (`jax.ShapeDtypeStruct` values) and then filled, either by a checkpoint reader or by
`initialize`. A filled module is a pytree and is passed to jitted functions as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

M = TypeVar("M", bound=nnx.Module)


class VocabMap(nnx.Variable):
    """An integer buffer that travels with a module and is never trained."""


def param(shape: tuple[int, ...], axes: tuple[str | None, ...], init: str = "normal") -> nnx.Param:
    """An abstract float32 parameter.

    `axes` are logical names, one per dimension: "vocab", "draft_vocab", "embed", "heads", "kv_heads", "mlp", "fused", "norm".
    `init` is "normal" (standard deviation 1/sqrt(fan-in), the first dimension being the input), "ones" or "zeros".
    """
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in length")
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes, init=init)


def named_variables(module: nnx.Module) -> Iterator[tuple[str, nnx.Variable]]:
    """(dotted path, variable) for every parameter and map, in a fixed order: "blocks.0.q", "norm", ..."""
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        yield ".".join(str(p) for p in path), variable


def is_matrix(name: str, variable: nnx.Variable) -> bool:
    """Whether a variable is the weight of a product (or a table of embeddings): no norm, bias or map."""
    axes = variable.get_metadata().get("axes") or ()
    return isinstance(variable, nnx.Param) and len(axes) > 1 and "norm" not in axes and not name.endswith("_bias")


def is_table(variable: nnx.Variable) -> bool:
    """Whether a matrix is read by rows: embeddings, whose rows are the outputs where it is a tied head too."""
    return (variable.get_metadata().get("axes") or (None,))[0] == "vocab"


def fill(module: M, values: Mapping[str, Any]) -> M:
    """A copy of `module` that holds `values` by dotted path. Raises ValueError naming a missing, extra or misshapen one."""
    graphdef, state = nnx.split(module)
    flat = nnx.to_flat_state(state)
    names = {".".join(str(p) for p in path): variable for path, variable in flat}
    missing, extra = sorted(names.keys() - values.keys()), sorted(values.keys() - names.keys())
    if missing or extra:
        raise ValueError(f"parameters do not match: missing {missing[:5]}, unexpected {extra[:5]}")
    filled = []
    for path, variable in flat:
        value = values[".".join(str(p) for p in path)]
        want = variable.get_value().shape
        if tuple(value.shape) != tuple(want):
            raise ValueError(f"{'.'.join(map(str, path))}: shape {tuple(value.shape)}, expected {tuple(want)}")
        filled.append((path, variable.replace(value)))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def initialize(module: M, key: jax.Array, dtype: Any = jnp.float32) -> M:
    """Fills an abstract module with fresh parameters; integer maps are left to the caller (zeros)."""
    values = {}
    for i, (name, variable) in enumerate(named_variables(module)):
        spec = variable.get_value()
        if isinstance(variable, VocabMap):
            values[name] = jnp.zeros(spec.shape, spec.dtype)
            continue
        init = variable.get_metadata()["init"]
        if init == "normal":
            scale = 1.0 / math.sqrt(spec.shape[0])
            values[name] = (jax.random.normal(jax.random.fold_in(key, i), spec.shape, jnp.float32) * scale).astype(dtype)
        else:
            values[name] = jnp.full(spec.shape, 1.0 if init == "ones" else 0.0, dtype)
    return fill(module, values)


def count_parameters(module: nnx.Module) -> int:
    """Trainable scalars; works on abstract modules too."""
    return sum(math.prod(v.get_value().shape) for _, v in named_variables(module) if isinstance(v, nnx.Param))
