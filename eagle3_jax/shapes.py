"""Published targets by name, for programs that are compiled and sized without weights."""

from __future__ import annotations

from pathlib import Path

from eagle3_jax.config import RopeConfig, TargetConfig, read_json

LLAMA_3_ROPE = RopeConfig(theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)

LLAMA_31_8B = TargetConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131072,
    rope=LLAMA_3_ROPE,
    eos_token_ids=(128001, 128008, 128009),
)
LLAMA_33_70B = TargetConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_position=131072,
    rope=LLAMA_3_ROPE,
    eos_token_ids=(128001, 128008, 128009),
)
SHAPES = {"llama-3.1-8b": LLAMA_31_8B, "llama-3.3-70b": LLAMA_33_70B}


def target_shape(name: str) -> TargetConfig:
    """The configuration of a named shape, or of a folder's config.json. Raises ValueError listing the names."""
    if name.lower() in SHAPES:
        return SHAPES[name.lower()]
    path = Path(name) / "config.json"
    if not path.is_file():
        raise ValueError(f"{name}: neither a known shape ({', '.join(SHAPES)}) nor a folder with a config.json")
    return TargetConfig.from_hf(read_json(path), str(path))
