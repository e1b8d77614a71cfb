"""Where the checkpoints of each supported model type differ from LLaMA's. One model, one table: a family is a row, not a copy of the code.

Source: the `configuration_*.py` and `modeling_*.py` of Hugging Face Transformers, whose defaults these are for keys a file leaves out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Family:
    """One model type.

    qkv_bias, o_bias, mlp_bias: whether these projections have biases, or the configuration's key that says so.
    qk_norm: queries and keys are normed per head before the rotation.
    windows: which blocks see only the last `sliding_window` positions: "never", "always" (every block, unless the key is null), or
    "switched" (those that `layer_types` names, else from `max_window_layers` on, and only with `use_sliding_window`).
    max_position, num_kv_heads, head_dim: what a missing key means; None: as many as query heads, and hidden width / heads.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: Literal["never", "always", "switched"] = "never"
    max_position: int = 32768
    num_kv_heads: int | None = None
    head_dim: int | None = None


FAMILIES = {
    "llama": Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", max_position=2048),
    "mistral": Family(windows="always", max_position=131072, num_kv_heads=8),
    "qwen2": Family(qkv_bias=True, windows="switched", num_kv_heads=32),
    "qwen3": Family(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, windows="switched", num_kv_heads=32, head_dim=128),
}


def block_windows(family: Family, config: Mapping[str, Any], num_layers: int, max_position: int) -> tuple[int | None, ...]:
    """Per block the number of last positions that a query reads, its own included, or None for all; () when no block has a window.

    Windows that the context of `max_position` cannot leave are none. Raises ValueError for settings that contradict each other.
    """
    window = config.get("sliding_window", None if family.windows == "never" else 4096)
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"sliding_window must be a positive integer or null, found {window!r}")
    if family.windows == "never" and window is not None:
        raise ValueError(f"sliding_window {window} is not part of this model_type")
    if family.windows == "switched" and not config.get("use_sliding_window", False):
        window = None
    slides = [window is not None] * num_layers
    if family.windows == "switched":
        slides = [window is not None and i >= int(config.get("max_window_layers", 28)) for i in range(num_layers)]
    layers = config.get("layer_types")
    if layers is not None:
        named = [kind == "sliding_attention" for kind in layers]
        if len(layers) != num_layers or not set(layers) <= {"full_attention", "sliding_attention"}:
            raise ValueError(f"layer_types must name full_attention or sliding_attention for each of {num_layers} blocks, found {layers}")
        if any(named) and window is None:
            raise ValueError("layer_types names sliding_attention, but no sliding_window is in use")
        if family.windows != "switched" and named != slides:
            raise ValueError(f"layer_types {layers} is not what this model_type does with sliding_window {window}")
        slides = named
    if window is None or window >= max_position or not any(slides):
        return ()
    return tuple(window if sliding else None for sliding in slides)
