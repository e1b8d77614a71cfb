"""EAGLE-3 heads on disk: one table per dialect, read and written.

Official dialect (and what vLLM, SGLang and SpecForge read): safetensors with `midlayer.*`; `d2t` int64 [U] holds OFFSETS
(target id = draft id + offset), `t2d` bool [V] marks the kept ids; both are absent when U == V.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import ConfigError, DraftConfig, RopeConfig, TargetConfig, read_json
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.target import Target
from eagle3_jax.weights.table import Row, WeightsError, check_keys, compute_dtype, read_rows, write_rows
from eagle3_jax.weights.tensor_files import SINGLE, TensorFiles

OFFICIAL = (
    Row("fc.weight", "fc", transpose=True),
    Row("midlayer.input_layernorm.weight", "input_norm"),
    Row("midlayer.hidden_norm.weight", "hidden_norm"),
    Row("midlayer.self_attn.q_proj.weight", "q", transpose=True),
    Row("midlayer.self_attn.k_proj.weight", "k", transpose=True),
    Row("midlayer.self_attn.v_proj.weight", "v", transpose=True),
    Row("midlayer.self_attn.o_proj.weight", "o", transpose=True),
    Row("midlayer.post_attention_layernorm.weight", "mlp_norm"),
    Row("midlayer.mlp.gate_proj.weight", "gate", transpose=True),
    Row("midlayer.mlp.up_proj.weight", "up", transpose=True),
    Row("midlayer.mlp.down_proj.weight", "down", transpose=True),
    Row("norm.weight", "norm"),
    Row("lm_head.weight", "head", transpose=True),
)
DIALECTS: dict[str, tuple[Row, ...]] = {"official": OFFICIAL}
MAPS = ("d2t", "t2d")
# Switches of later EAGLE-3 variants that change what the head computes: refused, not ignored.
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "speculators_model_type")
STORED_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16), "float16": np.dtype(np.float16)}


def load_head(
    path: str | os.PathLike[str],
    target_or_config: Target | TargetConfig,
    taps: tuple[int, ...] | None = None,
    rope_theta: float | None = None,
    dtype: Any = "float32",
) -> Eagle3Draft:
    """The head in a folder (config.json; model.safetensors or pytorch_model.bin; float16, bfloat16 or float32), filled, in `dtype`.

    taps: entering-block ids for a head whose config stores none; they must agree with stored ones. Neither: the official default.
    rope_theta: replaces the config's rotary embedding by this base without scaling, for heads whose config is wrong about it.
    Raises ConfigError or WeightsError naming file and key; a head for another target is refused with both numbers.
    """
    folder = Path(path)
    target = target_or_config.config if isinstance(target_or_config, Target) else target_or_config
    number = compute_dtype(dtype)
    config = head_config(folder, target, taps)
    if rope_theta is not None:
        config = dataclasses.replace(config, rope=RopeConfig(theta=float(rope_theta)))
    rows, files = DIALECTS["official"], TensorFiles(folder)
    maps = [key for key in MAPS if key in files.files]
    if config.draft_vocab_size < config.vocab_size and len(maps) < len(MAPS):
        absent = next(key for key in MAPS if key not in maps)
        raise WeightsError(
            f"{folder}: tensor {absent!r} is missing; a draft vocabulary of {config.draft_vocab_size} in {config.vocab_size} needs its map"
        )
    check_keys(rows, files.files, str(folder), ignore=lambda key: key in MAPS)
    d2t = read_vocab_map({key: files.read(key) for key in maps}, config, str(folder))
    return read_rows(Eagle3Draft(config), rows, files.read, number, files.where, given={"d2t": jnp.asarray(d2t)})


def head_config(folder: Path, target: TargetConfig, taps: tuple[int, ...] | None = None) -> DraftConfig:
    """The head's shape from its config.json, checked against the target's hidden size, vocabulary, depth and taps."""
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("model_type", "llama") != "llama":
        raise ConfigError(f"{path}: model_type {raw['model_type']!r} is not supported (supported: llama)")
    for key in VARIANTS:
        if raw.get(key):
            raise ConfigError(f"{path}: {key} {raw[key]!r} is not supported")
    if raw.get("num_hidden_layers", 1) != 1:
        raise ConfigError(f"{path}: num_hidden_layers {raw['num_hidden_layers']}: an EAGLE-3 head has 1")
    hidden = raw.get("target_hidden_size") or raw.get("hidden_size")
    facts = (
        ("hidden size", hidden, target.hidden_size),
        ("vocabulary", raw.get("vocab_size"), target.vocab_size),
        ("number of blocks", raw.get("target_num_hidden_layers", target.num_layers), target.num_layers),
    )
    for name, head, wanted in facts:
        if head is not None and head != wanted:
            raise ConfigError(f"{path}: this head is for a target whose {name} is {head}; the given target's is {wanted}")
    config = DraftConfig.from_hf(raw, target, str(path), taps)
    if config.hidden_size != target.hidden_size:
        raise ConfigError(
            f"{path}: hidden_size {config.hidden_size} differs from the target's {target.hidden_size}: "
            "a head narrower than its target needs an embedding of its own, which is not supported"
        )
    return config


def read_vocab_map(maps: Mapping[str, np.ndarray], config: DraftConfig, where: str) -> np.ndarray:
    """int32 [U] absolute target ids, ascending, from the stored `d2t` offsets and `t2d` mask; identity where neither is stored.

    Raises WeightsError for a wrong shape or dtype, an id outside the vocabulary, ids that do not ascend, or maps that disagree.
    """
    U, V = config.draft_vocab_size, config.vocab_size
    ids = np.arange(U, dtype=np.int64)
    if "d2t" in maps:
        offsets = maps["d2t"]
        if offsets.shape != (U,) or offsets.dtype.kind not in "iu":
            raise WeightsError(f"{where}: tensor 'd2t' is {offsets.dtype} {list(offsets.shape)}, expected integers [{U}]")
        ids = ids + offsets.astype(np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= V))
    if outside.size:
        i = int(outside[0])
        raise WeightsError(f"{where}: tensor 'd2t' sends draft id {i} to {int(ids[i])}, outside the vocabulary of {V} (d2t holds offsets)")
    falling = np.flatnonzero(np.diff(ids) <= 0)
    if falling.size:
        i = int(falling[0])
        raise WeightsError(f"{where}: tensor 'd2t' sends draft ids {i} and {i + 1} to {int(ids[i])} and {int(ids[i + 1])}: ids must ascend")
    if "t2d" in maps:
        mask = maps["t2d"]
        if mask.shape != (V,) or mask.dtype.kind not in "biu":
            raise WeightsError(f"{where}: tensor 't2d' is {mask.dtype} {list(mask.shape)}, expected bool [{V}]")
        if not np.array_equal(np.flatnonzero(mask), ids):
            raise WeightsError(f"{where}: tensors 't2d' and 'd2t' disagree: {np.count_nonzero(mask)} and {U} ids, not the same ones")
    return ids.astype(np.int32)


def save_head(
    draft: Eagle3Draft,
    folder: str | os.PathLike[str],
    dtype: str = "bfloat16",
    extra_config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a head in the official dialect (config.json, model.safetensors) and returns the folder.

    dtype: "bfloat16", "float16" or "float32" on disk. extra_config: further keys for config.json, such as token ids or how it was trained.
    The folder appears complete or not at all. Raises WeightsError for a folder that already holds a head (unless `overwrite`),
    a weight that is not finite in `dtype`, or an extra key that contradicts the head.
    """
    from safetensors.numpy import save_file

    folder = Path(folder).absolute()
    if dtype not in STORED_DTYPES:
        raise WeightsError(f"dtype {dtype!r} is not supported (supported: {', '.join(STORED_DTYPES)})")
    if not overwrite and any((folder / name).exists() for name in ("config.json", SINGLE)):
        raise WeightsError(f"{folder}: already holds a model; pass overwrite=True to replace it")
    config = head_config_json(draft.config, dtype)
    for key, value in (extra_config or {}).items():
        if key in config and config[key] != value:
            raise WeightsError(f"extra_config: {key} is {value!r}, but the head's own is {config[key]!r}")
        config[key] = value
    tensors = head_tensors(draft, STORED_DTYPES[dtype])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        new = Path(temporary) / folder.name
        new.mkdir()
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, new / SINGLE, metadata={"format": "pt"})
        if not folder.exists():
            os.replace(new, folder)
            return folder
        # Between these steps the folder has no config.json and refuses to load: never new weights under an old configuration.
        (folder / "config.json").unlink(missing_ok=True)
        os.replace(new / SINGLE, folder / SINGLE)
        os.replace(new / "config.json", folder / "config.json")
    return folder


def head_tensors(draft: Eagle3Draft, dtype: np.dtype) -> dict[str, np.ndarray]:
    """The official dialect's tensors by key: weights in `dtype`, and the vocabulary maps when U < V."""
    config = draft.config
    ids = np.asarray(draft.d2t[...]).astype(np.int64)
    mask = np.zeros(config.vocab_size, np.bool_)
    inside = (ids >= 0) & (ids < config.vocab_size)
    mask[ids[inside]] = True
    maps = {"d2t": ids - np.arange(config.draft_vocab_size), "t2d": mask}
    read_vocab_map(maps, config, "the head's d2t")  # What would not load again must not be written.
    tensors = write_rows(draft, DIALECTS["official"], dtype)
    return tensors | (maps if config.draft_vocab_size < config.vocab_size else {})


def head_config_json(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """config.json of the official dialect as vLLM, SGLang and transformers 4 and 5 read it.

    `eagle_taps` are entering-block ids; so are `eagle_aux_hidden_state_layer_ids` at the top level, where vLLM looks for them.
    """
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "max_position_embeddings": config.max_position,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "target_num_hidden_layers": config.target_num_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "eagle_taps": list(config.taps),
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        **config.rope.to_hf(),
    }
