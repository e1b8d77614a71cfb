"""EAGLE-3 heads on disk, read and written in every dialect of `dialects`."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import ConfigError, DraftConfig, RopeConfig, TargetConfig, read_json
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.int8 import Int8
from eagle3_jax.panels import in_plain
from eagle3_jax.target import Target
from eagle3_jax.weights.dialects import (
    ALIASES,
    EMBEDDING,
    Dialect,
    by_tensors,
    detect,
    dialect_named,
    flat_config,
    head_rows,
    layer_prefix,
)
from eagle3_jax.weights.table import WeightsError, check_keys, compute_dtype, read_rows, write_rows
from eagle3_jax.weights.tensor_files import SINGLE, TensorFiles
from eagle3_jax.weights.vocab_maps import MAPS, read_vocab_map, write_vocab_map

STORED_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16), "float16": np.dtype(np.float16)}


def load_head(
    path: str | os.PathLike[str],
    target_or_config: Target | TargetConfig,
    taps: tuple[int, ...] | None = None,
    rope_theta: float | None = None,
    dtype: Any = "float32",
    *,
    dialect: str | None = None,
    tap_convention: str | None = None,
) -> Eagle3Draft:
    """The head in a folder (config.json; model.safetensors or pytorch_model.bin; float16, bfloat16 or float32), filled, in `dtype`.

    taps: entering-block ids for a head whose config stores none; they must agree with stored ones. Neither: the official default.
    rope_theta: replaces the config's rotary embedding by this base without scaling, for heads whose config is wrong about it.
    dialect: "official", "specforge" or "speculators"; None: told from the files' content, never from their name.
    tap_convention: what stored ids mean where that is open, "entering" or "output" (see `config.stored_taps`).
    An embedding in the file is kept as the head's own unless a filled target has the same one.
    Raises ConfigError or WeightsError naming file and key; a head for another target is refused with both numbers.
    """
    folder = Path(path)
    target = target_or_config.config if isinstance(target_or_config, Target) else target_or_config
    number = compute_dtype(dtype)
    files = HeadFiles(folder, dialect)
    config = files.config(target, taps, tap_convention)
    if rope_theta is not None:
        config = dataclasses.replace(config, rope=RopeConfig(theta=float(rope_theta)))
    ignored: set[str] = set(MAPS)
    if config.own_embedding and isinstance(target_or_config, Target) and files.has_embedding_of(target_or_config, number):
        config = dataclasses.replace(config, own_embedding=False)
        ignored.add(EMBEDDING)
    d2t = files.vocab_map(config)
    rows = head_rows(config, layer_prefix(files.keys, str(folder)))
    check_keys(rows, files.keys, str(folder), ignore=ignored.__contains__)
    return read_rows(Eagle3Draft(config), rows, files.read, number, files.where, given={"d2t": jnp.asarray(d2t)})


class HeadFiles:
    """A head's folder: its configuration as flat keys, its tensors by their present-day names. Raises ConfigError or WeightsError."""

    def __init__(self, folder: Path, dialect: str | None = None):
        self.folder = folder
        self.path = folder / "config.json"
        self.raw = read_json(self.path)
        self.dialect: Dialect = dialect_named(detect(self.raw) if dialect is None else dialect)
        self.flat = flat_config(self.dialect, self.raw, str(self.path))
        self.tensors = TensorFiles(folder)
        self.keys: dict[str, str] = {}
        for stored in self.tensors.files:
            key = ALIASES.get(stored, stored)
            if key in self.keys:
                raise WeightsError(f"{folder}: tensors {self.keys[key]!r} and {stored!r} are the same weight")
            self.keys[key] = stored
        self.flat = by_tensors(self.flat, self.keys, str(self.path))

    def where(self, key: str) -> str:
        """The file that holds a tensor, for messages."""
        return self.tensors.where(self.keys[key])

    def read(self, key: str) -> np.ndarray:
        """One tensor in its stored dtype; WeightsError for one that is not finite (trainers mark what they never filled by NaN)."""
        array = self.tensors.read(self.keys[key])
        if jnp.issubdtype(array.dtype, jnp.floating) and not np.isfinite(array.astype(np.float32)).all():
            raise WeightsError(f"{self.where(key)}: tensor {self.keys[key]!r} holds values that are not finite")
        return array

    def has_embedding_of(self, target: Target, dtype: np.dtype) -> bool:
        """Whether the file's embedding is the target's, in the type it would be read in. An int8 target's cannot be told."""
        given = in_plain(target.embed[...])
        if isinstance(given, Int8) or self.tensors.read(self.keys[EMBEDDING]).shape != given.shape:
            return False
        return np.array_equal(self.read(EMBEDDING).astype(dtype), np.asarray(given).astype(dtype))

    def config(self, target: TargetConfig, taps: tuple[int, ...] | None = None, tap_convention: str | None = None) -> DraftConfig:
        """The head's shape, checked against the target's hidden size, vocabulary, depth and taps."""
        flat, path = self.flat, str(self.path)
        facts = (
            ("hidden size", flat.get("target_hidden_size") or flat.get("hidden_size"), target.hidden_size),
            ("vocabulary", flat.get("vocab_size"), target.vocab_size),
            ("number of blocks", flat.get("target_num_hidden_layers", target.num_layers), target.num_layers),
        )
        for name, head, wanted in facts:
            if head is not None and head != wanted:
                raise ConfigError(f"{path}: this head is for a target whose {name} is {head}; the given target's is {wanted}")
        config = DraftConfig.from_hf(flat, target, path, taps, tap_convention or self.dialect.convention, EMBEDDING in self.keys)
        if target.num_layers in config.taps and not flat.get("eagle_taps") and not taps:
            raise ConfigError(f"{path}: taps {config.taps}: the last block's output before the final norm is not supported as a tap")
        return config

    def vocab_map(self, config: DraftConfig) -> np.ndarray:
        """int32 [U] absolute target ids, ascending."""
        maps = [key for key in MAPS if key in self.keys]
        if config.draft_vocab_size < config.vocab_size and len(maps) < len(MAPS):
            absent = next(key for key in MAPS if key not in maps)
            raise WeightsError(
                f"{self.folder}: tensor {absent!r} is missing; "
                f"a draft vocabulary of {config.draft_vocab_size} in {config.vocab_size} needs its map"
            )
        return read_vocab_map({key: self.tensors.read(key) for key in maps}, config, str(self.folder))


def save_head(
    draft: Eagle3Draft,
    folder: str | os.PathLike[str],
    dtype: str = "bfloat16",
    extra_config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    *,
    dialect: str = "official",
    target_name: str | None = None,
    card: str | None = None,
    embedding: Any = None,
) -> Path:
    """Writes a head (config.json, model.safetensors, with `card` README.md) and returns the folder.

    dtype: "bfloat16", "float16" or "float32" on disk. extra_config: further keys for config.json, such as token ids or how it was trained.
    target_name: the target's hub id or folder, which the speculators dialect stores. card: see `model_card`.
    embedding: the target's table [V, D], written too where the head has none of its own (the speculators package fills a missing one
    from the target, but not reliably).
    The folder appears complete or not at all. Raises WeightsError for a folder that is there and not empty (unless `overwrite`),
    what the dialect cannot carry, a weight that is not finite in `dtype`, or an extra key that contradicts the head.
    """
    from safetensors.numpy import save_file

    folder = Path(folder).absolute()
    if dtype not in STORED_DTYPES:
        raise WeightsError(f"dtype {dtype!r} is not supported (supported: {', '.join(STORED_DTYPES)})")
    if not overwrite and folder.exists() and any(folder.iterdir()):
        raise WeightsError(f"{folder}: is there already and not empty; pass overwrite=True to write the head into it")
    language = dialect_named(dialect)
    language.check(draft.config)
    if dialect == "speculators" and target_name is None:
        raise WeightsError("the speculators dialect stores its target's name: pass target_name")
    config = language.write(draft.config, dtype, target_name)
    for key, value in (extra_config or {}).items():
        if key in config and config[key] != value:
            raise WeightsError(f"extra_config: {key} is {value!r}, but the head's own is {config[key]!r}")
        config[key] = value
    tensors = head_tensors(draft, STORED_DTYPES[dtype], language)
    if embedding is not None and not draft.config.own_embedding:
        if tuple(embedding.shape) != (draft.config.vocab_size, draft.config.hidden_size):
            raise WeightsError(f"embedding: {tuple(embedding.shape)}, expected {(draft.config.vocab_size, draft.config.hidden_size)}")
        tensors[EMBEDDING] = np.array(embedding, dtype=STORED_DTYPES[dtype], order="C")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        new = Path(temporary) / folder.name
        new.mkdir()
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, new / SINGLE, metadata={"format": "pt"})
        # The writer of safetensors keeps its file to the owner; the umask says who may read.
        shutil.copymode(new / "config.json", new / SINGLE)
        if card is not None:
            (new / "README.md").write_text(card, encoding="utf-8")
        if not folder.exists():
            os.replace(new, folder)
            return folder
        # Between these steps the folder has no config.json and refuses to load: never new weights under an old configuration.
        (folder / "config.json").unlink(missing_ok=True)
        for name in (SINGLE, *(["README.md"] if card is not None else []), "config.json"):
            os.replace(new / name, folder / name)
    return folder


def head_tensors(draft: Eagle3Draft, dtype: np.dtype, dialect: Dialect) -> dict[str, np.ndarray]:
    """A dialect's tensors by key: weights in `dtype`, and the vocabulary maps when U < V."""
    maps = write_vocab_map(np.asarray(draft.d2t[...]), draft.config)
    return write_rows(draft, head_rows(draft.config, dialect.layer), dtype) | maps
