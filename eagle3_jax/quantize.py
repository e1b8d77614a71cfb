"""A model with int8 weights: its matrices as `Int8`, its norms and biases as they were."""

from __future__ import annotations

from typing import TypeVar

import jax
from flax import nnx

from eagle3_jax.int8 import Int8, to_int8
from eagle3_jax.params import fill, named_variables

M = TypeVar("M", bound=nnx.Module)

WEIGHTS = ("float", "int8")


def quantize_int8(module: M) -> M:
    """A copy of a filled target or head whose matrices are int8, a scale per output channel. Quantising twice changes nothing.

    It decodes like any other; it is not trained, and not saved.
    """
    values = {}
    for name, variable in named_variables(module):
        value = variable.get_value()
        axes = list(variable.get_metadata().get("axes") or ())
        matrix = isinstance(variable, nnx.Param) and len(axes) > 1 and "norm" not in axes and not name.endswith("_bias")
        # A table of embeddings is read by rows, and as a tied head its rows are the outputs.
        values[name] = to_int8(value, 1 if axes[0] == "vocab" else 0) if matrix and not isinstance(value, Int8) else value
    return fill(module, values)


def weight_bytes(module: object) -> int:
    """Bytes of a model's arrays, scales included."""
    return sum(x.nbytes for x in jax.tree.leaves(module))
