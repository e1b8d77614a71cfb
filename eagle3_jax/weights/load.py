"""`load_target`: one call for every kind of file."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from eagle3_jax.target import Target
from eagle3_jax.weights.builtin import BUILTIN_MODELS, builtin_file
from eagle3_jax.weights.gguf import load_gguf
from eagle3_jax.weights.source import locate
from eagle3_jax.weights.table import WeightsError, compute_dtype


def load_target(path_or_id: str | os.PathLike[str], dtype: Any = "float32", mesh: None = None) -> Target:
    """The frozen target, filled: a `.gguf` file or the built-in name "smollm2-135m"."""
    if mesh is not None:
        raise WeightsError("mesh: loading onto a mesh is not supported; pass None and shard the loaded module")
    number = compute_dtype(dtype)
    path = locate(path_or_id, {name: partial(builtin_file, name) for name in BUILTIN_MODELS}, ["*.json", "*.safetensors"])
    return load_gguf(Path(path), number)
