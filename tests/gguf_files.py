"""Small GGUF files for the tests, written with the `gguf` package the way llama.cpp's converter lays out LLaMA and Qwen models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (0, 1, ..., H-1) to (0, H/2, 1, H/2 + 1, ...), as GGUF stores q and k of LLaMA."""
    H = weight.shape[0] // heads
    order = [h * H + offset + i for h in range(heads) for i in range(H // 2) for offset in (0, H // 2)]
    return weight[order]


def gguf_name(key: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    stem, kind = key.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def architecture_of(config: dict[str, Any]) -> str:
    """GGUF's name of a model type: Mistral's tensors are LLaMA's, and so is its name."""
    return {"mistral": "llama"}.get(config["model_type"], config["model_type"])


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a model with this Hugging Face configuration; unsigned integers, float32, strings."""
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config.get("rope_theta", 10000.0),
    }
    return {f"{architecture_of(config)}.{key}": value for key, value in values.items()} | {
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
) -> Path:
    """A GGUF file; `tensors` go by GGUF name, matrices stored as `kind` and vectors as float32. Metadata None leaves a key out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in (tensors or {}).items():
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face tensors under their GGUF names, q and k of LLaMA interleaved."""
    interleaved = architecture_of(config) == "llama"
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    result = {}
    for key, array in tensors.items():
        for part, count in heads.items():
            if interleaved and f".{part}." in key:
                array = interleave(array, count)
        result[gguf_name(key)] = np.ascontiguousarray(array)
    return result
