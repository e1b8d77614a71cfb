"""GGUF files of LLaMA-family models: configuration and weights, dequantised with the `gguf` package."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

from eagle3_jax.config import RopeConfig, TargetConfig
from eagle3_jax.layers import inverse_frequencies
from eagle3_jax.target import Target, parts
from eagle3_jax.weights.table import Row, WeightsError, check_keys, projection_rows, read_rows

QUANTIZATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q6_K")
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
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """A metadata value; WeightsError when the file has none."""
        value = self.get(key)
        if value is None:
            raise WeightsError(f"{self.path}: metadata key {key!r} is missing")
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
        return dequantize(tensor.data, tensor.tensor_type)


def gguf_config(file: GGUFFile) -> TargetConfig:
    """The target's shape from the file's metadata. Raises WeightsError for another architecture, rope type or a split file."""
    architecture = file.need("general.architecture")
    if architecture != "llama":
        raise WeightsError(f"{file.path}: general.architecture {architecture!r} is not supported (supported: llama)")
    if file.get("llama.expert_count", 0):
        raise WeightsError(f"{file.path}: llama.expert_count {file.get('llama.expert_count')}: mixtures of experts are not supported")
    if file.get("split.count", 1) > 1:
        raise WeightsError(f"{file.path}: one of {file.get('split.count')} parts; merge them into one file (llama-gguf-split --merge)")
    if "token_embd.weight" not in file.tensors:
        raise WeightsError(f"{file.path}: tensor 'token_embd.weight' is missing")
    heads, hidden = int(file.need("llama.attention.head_count")), int(file.need("llama.embedding_length"))
    head_dim = int(file.get("llama.attention.key_length", hidden // heads))
    rotated = int(file.get("llama.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise WeightsError(f"{file.path}: llama.rope.dimension_count {rotated} differs from the head width {head_dim}: not supported")
    eos = {file.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")}
    return TargetConfig(
        vocab_size=int(file.tensors["token_embd.weight"].shape[-1]),
        hidden_size=hidden,
        intermediate_size=int(file.need("llama.feed_forward_length")),
        num_layers=int(file.need("llama.block_count")),
        num_heads=heads,
        num_kv_heads=int(file.get("llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_position=int(file.need("llama.context_length")),
        # Stored as float32: 9.99999975e-06 is 1e-5.
        rms_norm_eps=float(f"{file.need('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope=_rope(file, head_dim),
        tie_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(sorted(int(i) for i in eos if i is not None)),
    )


def gguf_rows(config: TargetConfig) -> list[Row]:
    """The table of a LLaMA GGUF file."""
    rows = [Row("token_embd.weight", "embed"), Row("output_norm.weight", "norm")]
    if not config.tie_embeddings:
        rows.append(Row("output.weight", "head", transpose=True))
    norms = {"attn_norm": "attention_norm", "ffn_norm": "mlp_norm"}
    attention = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o"}
    mlp = {"ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"}
    for i in range(config.num_layers):
        rows += [Row(f"blk.{i}.{key}.weight", f"blocks.{i}.{path}") for key, path in norms.items()]
        for names, bias in ((attention, config.attention_bias), (mlp, config.mlp_bias)):
            for key, name in names.items():
                rows += projection_rows(f"blk.{i}.{key}", name, f"blocks.{i}", parts(config), bias)
    return rows


def load_gguf(path: Path, dtype: np.dtype) -> Target:
    """A filled target from a GGUF file, in `dtype`."""
    file = GGUFFile(path)
    config = gguf_config(file)
    rows = gguf_rows(config)
    check_keys(rows, file.tensors, str(path), ignore=lambda key: key == ROPE_FACTORS)

    def read(key: str) -> np.ndarray:
        array = file.read(key)
        for part, heads in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads)):
            if f".{part}." in key:
                return unpermute(array, heads)
        return array

    return read_rows(Target(config), rows, read, dtype, lambda key: str(path))


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from GGUF's interleaved rotary order (pairs 2i, 2i+1) back to half-split (pairs i, i + H/2)."""
    if array.shape[0] % (2 * heads):
        return array  # A wrong shape, reported by the table's check.
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _rope(file: GGUFFile, head_dim: int) -> RopeConfig:
    theta = float(f"{file.get('llama.rope.freq_base', 10000.0):.7g}")
    kind = file.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=float(file.need("llama.rope.scaling.factor")))
    if kind != "none":
        raise WeightsError(f"{file.path}: llama.rope.scaling.type {kind!r} is not supported (supported: none, linear)")
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
