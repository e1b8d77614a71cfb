"""A model with int8 weights: its matrices as `Int8`, its norms and biases as they were."""

from __future__ import annotations

from typing import TypeVar

import jax
from flax import nnx

from eagle3_jax.int8 import Int8, to_int8
from eagle3_jax.panels import in_plain
from eagle3_jax.params import fill, is_matrix, is_table, named_variables

M = TypeVar("M", bound=nnx.Module)

WEIGHTS = ("float", "int8")


def quantize_int8(module: M) -> M:
    """A copy of a filled target or head whose matrices are int8, a scale per output channel. Quantising twice changes nothing.

    It decodes like any other; it is not trained, and not saved.
    """
    values = {}
    for name, variable in named_variables(module):
        value = variable.get_value()
        if is_matrix(name, variable):
            value = in_plain(value)
            value = value if isinstance(value, Int8) else to_int8(value, 1 if is_table(variable) else 0)
        values[name] = value
    return fill(module, values)


def weight_bytes(module: object) -> int:
    """Bytes of a model's arrays, scales included."""
    return sum(x.nbytes for x in jax.tree.leaves(module))
