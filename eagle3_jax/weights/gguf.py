"""GGUF files of the architectures llama, qwen2 and qwen3: configuration and weights, dequantised with the `gguf` package."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from jax.sharding import Mesh

from eagle3_jax.config import RopeConfig, TargetConfig
from eagle3_jax.families import FAMILIES
from eagle3_jax.layers import inverse_frequencies
from eagle3_jax.target import Target
from eagle3_jax.weights.table import WeightsError, check_keys, read_rows
from eagle3_jax.weights.target_rows import target_rows

QUANTIZATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
# Whether the rows of q and k are stored in the interleaved rotary order. Mistral's files call themselves llama.
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "block": "blk.{}",
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
ROPE_FACTORS = "rope_freqs.weight"


class _Reader(gguf.GGUFReader):
    """The package's reader over a plain view of the mapped file: its hundred thousand small slices cost a third as memmap objects."""

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = mapped.view(np.ndarray)


class GGUFFile:
    """An opened GGUF file: metadata by key, tensors by name. Raises WeightsError for a file that cannot be read."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise WeightsError(f"{path}: no such file")
        try:
            self._reader = _Reader(path)
        except Exception as error:  # The reader fails in many ways on a damaged file: wrong magic, IndexError, reshape errors.
            raise WeightsError(f"{path}: not a readable GGUF file, or a truncated one ({type(error).__name__}: {error})") from error

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as a Python object, or `default`."""
        field = self._reader.get_field(key)
        try:
            return default if field is None else field.contents()
        except Exception as error:  # A string that is no UTF-8, a type it does not know.
            raise WeightsError(f"{self.path}: metadata key {key!r} cannot be read ({error})") from error

    def need(self, key: str) -> Any:
        """A metadata value; WeightsError when the file has none."""
        value = self.get(key)
        if value is None:
            raise WeightsError(f"{self.path}: metadata key {key!r} is missing")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A metadata value that is one number >= 0; WeightsError when it is missing without a default, or anything else."""
        value = self.get(key, default) if default is not None else self.need(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise WeightsError(f"{self.path}: metadata key {key!r} must be a number, found {value!r}")
        return value

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """The reader's tensor records by name."""
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised; shape [out, in] as in a Hugging Face checkpoint. WeightsError names an unsupported type."""
        tensor = self.tensors[name]
        kind = tensor.tensor_type.name
        if kind not in QUANTIZATIONS:
            raise WeightsError(f"{self.path}: tensor {name!r} is stored as {kind} (supported: {', '.join(QUANTIZATIONS)})")
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except Exception as error:  # A shape that is no multiple of the type's block.
            raise WeightsError(f"{self.path}: tensor {name!r} cannot be dequantised ({error})") from error


def gguf_config(file: GGUFFile) -> TargetConfig:
    """The target's shape from the file's metadata. Raises WeightsError for another architecture, rope type or a split file.

    A sliding window that the file does not name is none, as llama.cpp has it: `window_is_lost` says when there may have been one.
    """
    kind = file.need("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise WeightsError(f"{file.path}: general.architecture {kind!r} is not supported (supported: {', '.join(ARCHITECTURES)})")
    if file.get(f"{kind}.expert_count"):
        raise WeightsError(f"{file.path}: {kind}.expert_count {file.get(f'{kind}.expert_count')}: mixtures of experts are not supported")
    if file.number("split.count", 1) > 1:
        raise WeightsError(f"{file.path}: one of {file.get('split.count')} parts; merge them into one file (llama-gguf-split --merge)")
    if "token_embd.weight" not in file.tensors:
        raise WeightsError(f"{file.path}: tensor 'token_embd.weight' is missing")
    heads, hidden = int(file.number(f"{kind}.attention.head_count")), int(file.number(f"{kind}.embedding_length"))
    if heads < 1:
        raise WeightsError(f"{file.path}: {kind}.attention.head_count is {heads}")
    head_dim = int(file.number(f"{kind}.attention.key_length", hidden // heads))
    for key in (f"{kind}.rope.dimension_count", f"{kind}.attention.value_length"):
        if int(file.number(key, head_dim)) != head_dim:
            raise WeightsError(f"{file.path}: {key} {file.get(key)} differs from the head width {head_dim}: not supported")
    layers, max_position = int(file.number(f"{kind}.block_count")), int(file.number(f"{kind}.context_length"))
    if layers > len(file.tensors):
        raise WeightsError(f"{file.path}: {kind}.block_count {layers}, but there are only {len(file.tensors)} tensors")
    window = int(file.number(f"{kind}.attention.sliding_window", 0))
    special = {name: file.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
    if not all(token is None or isinstance(token, int) for token in special.values()):
        raise WeightsError(f"{file.path}: the ids of special tokens must be ints, found {special}")
    return TargetConfig(
        vocab_size=int(file.tensors["token_embd.weight"].shape[-1]),
        hidden_size=hidden,
        intermediate_size=int(file.number(f"{kind}.feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(file.number(f"{kind}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_position=max_position,
        # Stored as float32: 9.99999975e-06 is 1e-5.
        rms_norm_eps=float(f"{file.number(f'{kind}.attention.layer_norm_rms_epsilon'):.6g}"),
        rope=_rope(file, kind, head_dim),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=FAMILIES[kind].qk_norm,
        windows=(window,) * layers if 0 < window < max_position else (),
        bos_token_id=special["bos"],
        eos_token_ids=tuple(sorted({special[name] for name in ("eos", "eot")} - {None})),
        model_type="mistral" if kind == "llama" and window else kind,
    )


def window_is_lost(file: GGUFFile) -> bool:
    """Whether a file is a Mistral's by its names and says nothing of a sliding window, which llama.cpp's converter leaves out."""
    named = any("mistral" in str(file.get(f"general.{key}", "")).lower() for key in ("name", "basename"))
    return named and file.get(f"{file.need('general.architecture')}.attention.sliding_window") is None


def load_gguf(path: Path, dtype: np.dtype, mesh: Mesh | None = None) -> Target:
    """A filled target from a GGUF file, in `dtype`, on `mesh`."""
    file = GGUFFile(path)
    config = gguf_config(file)
    rows = target_rows(config, NAMES)
    check_keys(rows, file.tensors, str(path), lambda key: key == ROPE_FACTORS)
    interleaved = ARCHITECTURES[file.need("general.architecture")]

    def read(key: str) -> np.ndarray:
        array = file.read(key)
        if not interleaved:
            return array
        for part, heads in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads)):
            if f".{part}." in key:
                return unpermute(array, heads)
        return array

    return read_rows(Target(config), rows, read, dtype, lambda key: str(path), mesh=mesh)


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from GGUF's interleaved rotary order (pairs 2i, 2i+1) back to half-split (pairs i, i + H/2)."""
    if array.shape[0] % (2 * heads):
        return array  # A wrong shape, reported by the table's check.
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _rope(file: GGUFFile, kind: str, head_dim: int) -> RopeConfig:
    theta = float(f"{file.number(f'{kind}.rope.freq_base', 10000.0):.7g}")
    scaling = file.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=float(file.number(f"{kind}.rope.scaling.factor")))
    if scaling != "none":
        raise WeightsError(f"{file.path}: {kind}.rope.scaling.type {scaling!r} is not supported (supported: none, linear)")
    if ROPE_FACTORS not in file.tensors:
        return RopeConfig(theta=theta)
    # llama3 scaling is stored as one divisor per frequency; its parameters must be found again.
    factors = file.read(ROPE_FACTORS)
    rope = RopeConfig(theta=theta, kind="llama3", factor=float(factors.max()))
    plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    if factors.shape != plain.shape or not np.allclose(plain / factors, inverse_frequencies(rope, head_dim), rtol=1e-4, atol=0.0):
        raise WeightsError(
            f"{file.path}: tensor {ROPE_FACTORS!r} is not LLaMA 3's scaling (factors 1 and 4, 8192 positions): not supported"
        )
    return rope
