"""What is in a folder or file, what would be loaded from it, and what is odd about it; without loading a whole model."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import HEAD_VARIANTS, TAP_IDS, DraftConfig, TargetConfig, default_taps
from eagle3_jax.weights.dialects import EMBEDDING, PREFIXES, head_rows, layer_prefix
from eagle3_jax.weights.gguf import GGUFFile, gguf_config, window_is_lost
from eagle3_jax.weights.heads import HeadFiles
from eagle3_jax.weights.hf_target import hf_config
from eagle3_jax.weights.table import WeightsError, check_keys
from eagle3_jax.weights.tensor_files import LAYOUTS, TensorFiles
from eagle3_jax.weights.vocab_maps import MAPS


@dataclasses.dataclass(frozen=True)
class Inspection:
    """kind: "head" or "target". facts: what would be loaded, by name. odd: what a person should know. error: why it would not load."""

    path: str
    kind: str
    facts: dict[str, Any]
    odd: list[str]
    error: str | None


def inspect(path: Path, target: TargetConfig | None = None, **reading: Any) -> Inspection:
    """A head's folder, a target's folder or a .gguf file. `reading`: taps, rope_theta, dialect, tap_convention as `load_head` takes them.

    target: what a head is checked against; None: a target as the head itself describes it.
    """
    if path.suffix == ".gguf" and path.is_file():
        return _target(path, lambda: gguf_config(GGUFFile(path)), lambda: _odd_gguf(GGUFFile(path)))
    if not path.is_dir():
        raise WeightsError(f"{path}: expected a folder or a .gguf file")
    return _head(path, target, **reading) if is_head(path) else _target(path, lambda: hf_config(path))


def is_head(folder: Path) -> bool:
    """Whether a folder's tensors are those of an EAGLE-3 head, damaged ones included; False where they cannot be read."""
    try:
        keys = TensorFiles(folder).files
    except ValueError:
        config = folder / "config.json"
        return config.is_file() and any(word in config.read_text(errors="replace") for word in ("draft_vocab_size", "speculators_"))
    return "fc.weight" in keys or any(key.startswith(PREFIXES) for key in keys)


def stand_in(flat: Mapping[str, Any]) -> TargetConfig:
    """A target as a head's flat config describes it: what it does not say is guessed so that it changes nothing."""
    # The last default tap is L - 3 where a block's input is named, L - 4 where its output is.
    places = (((flat.get("eagle_config") or {}).get(TAP_IDS), 4), (flat.get("eagle_taps") or flat.get(TAP_IDS), 3))
    guesses = [max(ids) + behind for ids, behind in places if ids and all(isinstance(k, int) for k in ids)]
    layers = flat.get("target_num_hidden_layers") or (guesses[0] if guesses else 32)
    width = int(flat.get("target_hidden_size") or flat.get("hidden_size") or 0)
    return TargetConfig(
        vocab_size=int(flat.get("vocab_size") or 0),
        hidden_size=width,
        num_layers=int(layers),
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_position=1,
    )


def _odd_gguf(file: GGUFFile) -> list[str]:
    if not window_is_lost(file):
        return []
    return ["a Mistral without a sliding window: every position is read, as in llama.cpp; version 0.1's window of 4096 is in no such file"]


def _target(path: Path, read: Callable[[], TargetConfig], look: Callable[[], list[str]] = list) -> Inspection:
    try:
        config = read()
    except ValueError as error:
        return Inspection(str(path), "target", {}, [], str(error))
    facts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "rope"}
    facts |= {"rotary embedding": config.rope.to_hf()["rope_parameters"]}
    if config.num_layers >= 3:
        facts["default taps of a head"] = list(default_taps(config.num_layers))
    odd = [] if config.eos_token_ids else ["no stop id is named anywhere: answers end at the limit only"]
    odd += look()
    return Inspection(str(path), "target", facts, odd, None)


def _head(
    path: Path,
    target: TargetConfig | None,
    taps: tuple[int, ...] | None = None,
    rope_theta: float | None = None,
    dialect: str | None = None,
    tap_convention: str | None = None,
) -> Inspection:
    facts: dict[str, Any] = {}
    odd: list[str] = []
    error = None
    try:
        files = HeadFiles(path, dialect)
        flat = files.flat
        facts["dialect"] = files.dialect.name
        facts["files"] = sorted({file.name for file in files.tensors.files.values()})
        facts["tensors"] = len(files.keys)
        odd += _odd_files(path, files, told=dialect is None)
        config = files.config(target or stand_in(flat), taps, tap_convention)
        facts |= _facts(config, flat, target is not None)
        if rope_theta is not None:
            facts["rotary embedding"] = {"rope_theta": rope_theta, "rope_type": "default"}
        odd += _odd_config(config, files, target, taps)
        map_ = files.vocab_map(config)
        if config.draft_vocab_size < config.vocab_size and map_[-1] == len(map_) - 1:
            odd.append("the vocabulary map keeps the first ids of the vocabulary: it was most likely never filled")
        rows = head_rows(config, layer_prefix(files.keys, str(path)))
        check_keys(rows, files.keys, str(path), ignore=lambda key: key in MAPS)
        types, parameters = Counter(), 0
        for row in rows:
            array = files.read(row.key)
            types[str(array.dtype)] += 1
            parameters += array.size
            if array.size > 1 and not np.ptp(array.astype(np.float32)) and array.ndim > 1:
                odd.append(f"tensor {row.key!r} is constant: it was most likely never trained")
        facts |= {"stored types": dict(types), "parameters": parameters}
        if len(types) > 1:
            odd.append(f"the tensors are stored in several types: {', '.join(types)}")
    except ValueError as problem:
        error = str(problem)
    return Inspection(str(path), "head", facts, odd, error)


def stored_dtype(files: HeadFiles) -> str:
    """The type of a head's fc, "float32" for one that is not a type a head is written in."""
    name = jnp.dtype(files.read("fc.weight").dtype).name if "fc.weight" in files.keys else "float32"
    return name if name in ("float32", "bfloat16", "float16") else "float32"


def _facts(config: DraftConfig, flat: Mapping[str, Any], given: bool) -> dict[str, Any]:
    stored = flat.get("eagle_taps") or flat.get(TAP_IDS) or (flat.get("eagle_config") or {}).get(TAP_IDS)
    known = given or stored or flat.get("target_num_hidden_layers")
    return {
        "target": f"hidden size {config.target_hidden_size}, vocabulary {config.vocab_size}, "
        f"{config.target_num_layers if given or flat.get('target_num_hidden_layers') else 'unknown number of'} blocks",
        "draft vocabulary": config.draft_vocab_size,
        "layer": f"width {config.hidden_size}, {config.num_heads} heads of {config.head_dim} ({config.num_kv_heads} key/value), "
        f"MLP {config.intermediate_size}",
        "taps (blocks whose input is read)": list(config.taps) if known else "the default of its target",
        "rotary embedding": config.rope.to_hf()["rope_parameters"],
        "variants": [key for key in HEAD_VARIANTS if getattr(config, key)] or "none",
        "embedding": "in the file" if config.own_embedding else "the target's",
    }


def _odd_files(path: Path, files: HeadFiles, told: bool) -> list[str]:
    odd = []
    layouts = [
        single if (path / single).is_file() else index for single, index in LAYOUTS if (path / single).exists() or (path / index).exists()
    ]
    if len(layouts) > 1:
        odd.append(f"{' and '.join(layouts)} are both there: the first is read")
    prefix = layer_prefix(files.keys, str(path))
    if prefix != files.dialect.layer:
        odd.append(f"the layer's tensors start with {prefix!r}, where the {files.dialect.name} dialect has {files.dialect.layer!r}")
    if files.raw.get("tie_word_embeddings"):
        odd.append("tie_word_embeddings is set: SGLang would use the embedding as output head; the file's lm_head is used here")
    if told and files.dialect.name == "speculators" and files.raw.get("norm_before_residual") is None:
        odd.append("norm_before_residual is not said: vLLM takes it for true, which is done here; the speculators library for false")
    return odd


def _odd_config(config: DraftConfig, files: HeadFiles, target: TargetConfig | None, taps: tuple[int, ...] | None) -> list[str]:
    flat, odd = files.flat, []
    nested = (flat.get("eagle_config") or {}).get(TAP_IDS)
    if not taps and not nested and not flat.get(TAP_IDS) and not flat.get("eagle_taps"):
        odd.append("no taps are stored: the official default is assumed")
    if list(config.taps) != sorted(config.taps):
        odd.append(f"the taps {config.taps} do not ascend: vLLM and SGLang would hand the states over in ascending order")
    if nested and not flat.get(TAP_IDS):
        odd.append(f"tap ids only inside eagle_config ({json.dumps(nested)}): SGLang reads them as block outputs, vLLM as block inputs")
    if not (flat.get("rope_theta") or (flat.get("rope_parameters") or {}).get("rope_theta")):
        odd.append("no rotary base is stored: 10000 is assumed, as in the official code")
    if target is not None and config.rope != target.rope:
        odd.append(f"its rotary embedding differs from the target's ({json.dumps(target.rope.to_hf()['rope_parameters'])}): verify it")
    for key in ("norm_before_residual", "norm_before_fc"):
        if getattr(config, key):
            odd.append(f"{key} is set: SGLang ignores it without a word")
    if flat.get("target_hidden_size") and EMBEDDING not in files.keys:
        odd.append("target_hidden_size is set and no embedding is in the file: the official PyTorch code would leave it random")
    if config.own_embedding and config.hidden_size == config.target_hidden_size:
        odd.append("an embedding is in the file: SGLang uses the target's in its place; here it is used where it differs")
    return odd
