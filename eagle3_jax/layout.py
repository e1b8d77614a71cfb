"""A model's weights in the layout that suits the machine, and back."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.large_pages import Room
from eagle3_jax.native.build import NoNativeError, panel_width
from eagle3_jax.panels import Panels, in_panels, in_plain
from eagle3_jax.params import fill, is_matrix, is_table, named_variables

M = TypeVar("M", bound=nnx.Module)

LAYOUTS = ("auto", "plain", "panels")


def laid_out(module: M, layout: str, consume: bool = False) -> M:
    """A filled model with its matrices in `layout`: "plain" arrays as `params.param` shapes them; "panels", which a CPU reads fastest;
    "auto": panels where they serve, which is a CPU, float32 and a C++ compiler.

    consume: the model given is used up, matrix after matrix, so that no more than one is in memory twice.
    Raises ValueError for another name, and for "panels" where there can be none, saying why. A model on a mesh stays plain.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown; one of {', '.join(LAYOUTS)}")
    if layout == "plain":
        return plain(module)
    reason = why_plain(module)
    if reason is None:
        room = Room()
        return _map(module, lambda variable, weight: in_panels(in_plain(weight), panel_width(), is_table(variable), room), consume)
    if layout == "panels":
        raise ValueError(f"layout 'panels': {reason}")
    return module


def plain(module: M) -> M:
    """The model with its matrices as plain arrays (int8 ones as `Int8`), the numbers as they were: to train, split over a mesh or save."""
    return _map(module, lambda variable, weight: in_plain(weight))


def why_plain(module: nnx.Module) -> str | None:
    """Why this model's matrices cannot be in panels; None: they can."""
    for name, variable in named_variables(module):
        weight: Any = variable.get_value()
        if is_matrix(name, variable) and weight.dtype != jnp.float32:
            return f"{name} computes in {weight.dtype}, panels in float32"
        if is_matrix(name, variable) and len(weight.sharding.device_set) > 1:
            return f"{name} lies on a mesh"
    try:
        panel_width()
    except NoNativeError as error:
        return str(error)
    return None


def layout_of(module: object) -> str:
    """ "panels" or "plain", for reports."""
    variables = named_variables(module) if isinstance(module, nnx.Module) else ()
    return "panels" if any(isinstance(variable.get_value(), Panels) for _, variable in variables) else "plain"


def _map(module: M, change: Any, consume: bool = False) -> M:
    """The model with `change(variable, weight)` in the place of every matrix."""
    values = {}
    for name, variable in named_variables(module):
        weight = variable.get_value()
        values[name] = change(variable, weight) if is_matrix(name, variable) else weight
        if consume and values[name] is not weight:
            jax.tree.map(lambda array: array.delete(), weight)
    return fill(module, values)
