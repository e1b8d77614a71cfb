"""Tiny random checkpoints of LLaMA and its relatives, made alike by the tests and by `make_reference.py`.

numpy and safetensors only, no JAX, no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Head width 16 with D 48 and four heads: a reader that computes D / N is wrong in every one but the last.
CASES: dict[str, dict[str, Any]] = {
    "biases_one_kv_head_tied": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama3_two_kv_heads": {"rope_theta": None, "rope_parameters": {"rope_theta": 5000.0, **LLAMA3}},
    "linear_old_spelling": {"rope_scaling": {"type": "linear", "factor": 4.0}, "num_key_value_heads": 4},
    "no_head_dim": {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3, "rms_norm_eps": 1e-3},
}
# One per family and per thing that sets it apart; contexts and windows short enough that 48 tokens leave them behind.
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": None, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e6}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
FAMILY_CASES: dict[str, dict[str, Any]] = {
    "llama_dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32},
    "vicuna_linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 16, "max_sequence_length": 64},
    "mistral_window": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8, "head_dim": None},
    "qwen2_tied": QWEN2 | {"tie_word_embeddings": True},
    "qwen2_upper_window": QWEN2 | WINDOW | {"max_window_layers": 1},
    "qwen3": QWEN3,
    "qwen3_biases_window_by_layer": QWEN3 | WINDOW | {"attention_bias": True, "layer_types": ["sliding_attention", "full_attention"]},
}


# As small as its file in tests/reference should be.
TORCH_CASE = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


def config_of(case: str) -> dict[str, Any]:
    """The `config.json` of one case."""
    return {key: value for key, value in (BASE | (CASES | FAMILY_CASES)[case]).items() if value is not None}


def tensors_of(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors by Hugging Face name; norms lie around one, biases and weights around zero."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    N, K = config["num_attention_heads"], config["num_key_value_heads"]
    H = config.get("head_dim") or D // N
    kind = config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    projections = {
        "self_attn.q_proj": (N * H, D),
        "self_attn.k_proj": (K * H, D),
        "self_attn.v_proj": (K * H, D),
        "self_attn.o_proj": (D, N * H),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }

    def always_biased(name: str) -> bool:
        return kind == "qwen2" and name.removeprefix("self_attn.") in ("q_proj", "k_proj", "v_proj")

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{norm}.weight": (D,) for norm in ("input_layernorm", "post_attention_layernorm")}
        if kind == "qwen3":
            shapes |= {f"{layer}.self_attn.{norm}.weight": (H,) for norm in ("q_norm", "k_norm")}
        for name, shape in projections.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if always_biased(name) or config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                shapes[f"{layer}.{name}.bias"] = shape[:1]
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        uniform = random.random(shape) * 2 - 1
        scale = 2.0 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.5
        tensors[name] = (uniform * scale + ("norm" in name)).astype(np.float32)
    return tensors


def head_tensors() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and tensors of an EAGLE-3 head as the official code publishes it (float16, offsets): V 10, U 4, D 8, two heads of 6."""
    D, F, V, U = 8, 12, 10, 4
    config = {"model_type": "llama", "hidden_size": D, "intermediate_size": F, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"head_dim": 6, "num_hidden_layers": 1, "vocab_size": V, "draft_vocab_size": U, "architectures": ["LlamaForCausalLM"]}
    shapes = {
        "fc": (D, 3 * D),
        "midlayer.input_layernorm": (D,),
        "midlayer.hidden_norm": (D,),
        "midlayer.self_attn.q_proj": (12, 2 * D),
        "midlayer.self_attn.k_proj": (6, 2 * D),
        "midlayer.self_attn.v_proj": (6, 2 * D),
        "midlayer.self_attn.o_proj": (D, 12),
        "midlayer.post_attention_layernorm": (D,),
        "midlayer.mlp.gate_proj": (F, D),
        "midlayer.mlp.up_proj": (F, D),
        "midlayer.mlp.down_proj": (D, F),
        "norm": (D,),
        "lm_head": (U, D),
    }
    random = np.random.default_rng(1)
    tensors = {f"{name}.weight": random.random(shape).astype(np.float16) for name, shape in shapes.items()}
    return config, tensors | {"d2t": np.array([0, 2, 3, 6]), "t2d": np.isin(np.arange(V), [0, 3, 5, 9])}


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A Hugging Face folder: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


# What the recorded numbers of FAMILY_CASES cover: a pass over PASS tokens, of which every third position is kept, and greedy text.
PASS, KEPT, NEW = 48, slice(2, None, 3), 24


def prompts_of(config: dict[str, Any]) -> list[list[int]]:
    """A prompt within every context and window's reach of a switch, and one that is longer than all of them."""
    return [tokens_of(config, 20).tolist(), tokens_of(config, 40)[::-1].tolist()]


def tokens_of(config: dict[str, Any], length: int = 40) -> np.ndarray:
    """int64 [length] token ids that visit the vocabulary."""
    return (np.arange(length) * 37 + 5) % config["vocab_size"]
