"""A target written as a Hugging Face folder, the inverse of `hf_target`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from eagle3_jax.target import Target
from eagle3_jax.weights.heads import STORED_DTYPES
from eagle3_jax.weights.hf_target import hf_rows
from eagle3_jax.weights.table import WeightsError, write_rows
from eagle3_jax.weights.tensor_files import SINGLE


def save_target(
    target: Target, folder: str | os.PathLike[str], dtype: str = "float32", *, overwrite: bool = False, tokenizer: Any = None
) -> Path:
    """Writes config.json, model.safetensors and the tokenizer's files; the folder appears whole or not at all. Returns it.

    Raises WeightsError for a folder that exists (unless `overwrite`, which replaces it) and for a weight that is not finite in `dtype`,
    ConfigError for a target that a config of its family cannot describe.
    """
    from safetensors.numpy import save_file

    folder = Path(folder).absolute()
    if dtype not in STORED_DTYPES:
        raise WeightsError(f"dtype {dtype!r} is not supported (supported: {', '.join(STORED_DTYPES)})")
    if folder.exists() and not overwrite:
        raise WeightsError(f"{folder}: is there already; pass overwrite=True to replace it")
    config = {**target.config.to_hf(), "torch_dtype": dtype}
    tensors = write_rows(target, hf_rows(target.config), STORED_DTYPES[dtype])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, new / SINGLE, metadata={"format": "pt"})
        shutil.copymode(new / "config.json", new / SINGLE)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        if folder.exists():
            os.replace(folder, Path(temporary) / "old")
        os.replace(new, folder)
    return folder
