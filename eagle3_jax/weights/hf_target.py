"""Targets in Hugging Face folders: config.json, generation_config.json, the tokenizer's files, safetensors."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from eagle3_jax.config import ConfigError, TargetConfig, read_json, token_ids
from eagle3_jax.target import Target
from eagle3_jax.weights.table import Row, WeightsError, check_keys, read_rows
from eagle3_jax.weights.target_rows import target_rows
from eagle3_jax.weights.tensor_files import TensorFiles

NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "block": "model.layers.{}",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# Old checkpoints carry the rotary frequencies, which the configuration determines.
ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(original_)?inv_freq")


def hf_rows(config: TargetConfig) -> list[Row]:
    """The table of a causal language model as Transformers saves it."""
    return target_rows(config, NAMES)


def hf_config(folder: Path) -> TargetConfig:
    """The target's shape; its stop ids are the union of config.json, generation_config.json and the tokenizer's files."""
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("quantization_config"):
        raise ConfigError(f"{path}: quantization_config is not supported; use an unquantised checkpoint or a GGUF file")
    config = TargetConfig.from_hf(raw, str(path))
    for scope in (raw, raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}):
        if scope.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ConfigError(f"{path}: partial_rotary_factor {scope['partial_rotary_factor']} is not supported (supported: 1)")
    generation = folder / "generation_config.json"
    stops = set(config.eos_token_ids) | set(tokenizer_eos(folder))
    if generation.is_file():
        stops |= set(token_ids(read_json(generation).get("eos_token_id"), str(generation)))
    return dataclasses.replace(config, eos_token_ids=tuple(sorted(stops)))


def tokenizer_eos(folder: Path) -> tuple[int, ...]:
    """The id of the tokenizer's eos_token, looked up in its files without building it; empty where they do not tell."""
    settings = [read_json(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json") if (folder / name).is_file()]
    token = next((s["eos_token"] for s in settings if s.get("eos_token")), None)
    content = token.get("content") if isinstance(token, dict) else token
    if content is None:
        return ()
    for setting in settings:
        for token_id, added in setting.get("added_tokens_decoder", {}).items():
            if added.get("content") == content:
                return (int(token_id),)
    if not (folder / "tokenizer.json").is_file():
        return ()
    tokenizer = read_json(folder / "tokenizer.json")
    for added in tokenizer.get("added_tokens", []):
        if added.get("content") == content:
            return (int(added["id"]),)
    vocab: Any = tokenizer.get("model", {}).get("vocab")
    return (int(vocab[content]),) if isinstance(vocab, dict) and content in vocab else ()


def load_hf_target(folder: Path, dtype: np.dtype, mesh: Mesh | None = None) -> Target:
    """A filled target from a Hugging Face folder, in `dtype`, on `mesh`. Raises ConfigError or WeightsError naming file and key."""
    config = hf_config(folder)
    files = TensorFiles(folder)
    # Many tied checkpoints store the head again.
    copies = {"lm_head.weight"} & files.files.keys() if config.tie_embeddings else set()

    def ignored(key: str) -> bool:
        return key in copies or ROTARY_BUFFER.fullmatch(key) is not None

    rows = hf_rows(config)
    check_keys(rows, files.files, str(folder), ignored)
    if copies and not np.array_equal(files.read("lm_head.weight"), files.read("model.embed_tokens.weight")):
        raise WeightsError(
            f"{files.where('lm_head.weight')}: tensor 'lm_head.weight' differs from the embedding, but config.json says tie_word_embeddings"
        )
    return read_rows(Target(config), rows, files.read, dtype, files.where, mesh=mesh)
