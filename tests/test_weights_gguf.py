"""GGUF targets: the same model as in a Hugging Face folder, every supported storage type, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import architecture_of, gguf_tensors, interleave, metadata_of, write_gguf
from test_weights_target import REFERENCE, run
from tiny_checkpoints import BASE, config_of, tensors_of, tokens_of, write_folder

from eagle3_jax.config import RopeConfig
from eagle3_jax.layers import inverse_frequencies
from eagle3_jax.weights import WeightsError, load_target
from eagle3_jax.weights.gguf import GGUFFile, unpermute
from eagle3_jax.weights.inspection import inspect

# Blocks of 32 weights along a row.
WIDE = BASE | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def write(path: Path, config: dict[str, Any] = WIDE, changes: dict[str, Any] | None = None, **options: Any) -> Path:
    options = {"architecture": architecture_of(config)} | options
    return write_gguf(path, metadata_of(config) | (changes or {}), gguf_tensors(config, tensors_of(config)), **options)


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_rotary_rows_by_hand():
    """One head of width 4: half-split pairs (0, 2) and (1, 3) are stored side by side."""
    np.testing.assert_array_equal(interleave(np.arange(4), 1), [0, 2, 1, 3])
    np.testing.assert_array_equal(unpermute(np.array([0, 2, 1, 3]), 1), [0, 1, 2, 3])
    np.testing.assert_array_equal(unpermute(np.array([0, 2, 1, 3, 4, 6, 5, 7]), 2), np.arange(8))


@pytest.mark.parametrize("case", ["biases_one_kv_head_tied", "no_head_dim"])
def test_equals_the_hugging_face_folder_and_its_logits(case: str, tmp_path: Path):
    config = config_of(case)
    target = load_target(write(tmp_path / "model.gguf", config))
    folder = load_target(write_folder(tmp_path / "hf", config, tensors_of(config)))
    assert target.config == folder.config
    assert same(target, folder)
    logits, _ = run(target, tokens_of(config))
    np.testing.assert_allclose(logits, np.load(REFERENCE / "hf_tiny.npz")[f"{case}.logits"], atol=1e-4)


@pytest.mark.parametrize("case", ["qwen2_tied", "qwen3"])
def test_other_architectures_equal_the_hugging_face_folder(case: str, tmp_path: Path):
    """Their names for biases and norms, and no interleaving of q and k."""
    config = config_of(case)
    target = load_target(write(tmp_path / "model.gguf", config))
    folder = load_target(write_folder(tmp_path / "hf", config, tensors_of(config)))
    assert target.config == folder.config
    assert same(target, folder)


def test_a_sliding_window_is_read(tmp_path: Path):
    config = config_of("mistral_window")
    path = write(tmp_path / "model.gguf", config, {"llama.attention.sliding_window": 8})
    folder = load_target(write_folder(tmp_path / "hf", config, tensors_of(config)))
    assert load_target(path).config.windows == folder.config.windows == (8, 8)


def test_a_sliding_window_that_a_file_does_not_name_is_none_and_said(tmp_path: Path):
    """llama.cpp's converter drops Mistral's window and llama.cpp reads every position: so is it read here."""
    for name, window, odd in (("Mistral-7B-v0.1", None, True), ("Mistral-7B-v0.1", 8, False), ("Llama", None, False)):
        metadata = {"general.name": name, "llama.attention.sliding_window": window}
        path = write(tmp_path / "model.gguf", config_of("mistral_window"), metadata)
        assert load_target(path).config.windows == ((8, 8) if window else ())
        assert any("a Mistral without a sliding window" in text for text in inspect(path).odd) == odd


# Largest error as a share of a row's largest weight: half a step of each type.
@pytest.mark.parametrize(
    ("kind", "error"), [(Kind.F16, 1e-3), (Kind.BF16, 8e-3), (Kind.Q8_0, 1 / 200), (Kind.Q4_0, 1 / 7), (Kind.Q4_1, 1 / 14)]
)
def test_storage_types(kind: Kind, error: float, tmp_path: Path):
    tensors = tensors_of(WIDE)
    target = load_target(write(tmp_path / "model.gguf", kind=kind))
    for key, got in (
        ("model.embed_tokens.weight", target.embed[...]),
        ("lm_head.weight", target.head[...].T),
        ("model.layers.1.mlp.up_proj.weight", target.blocks[1].gate_up[:, 1].T),
        ("model.layers.0.mlp.down_proj.weight", target.blocks[0].down[...].T),
    ):
        difference = np.abs(np.asarray(got) - tensors[key]).max()
        assert 0 < difference <= error * np.abs(tensors[key]).max(), key


def test_q6_k(tmp_path: Path):
    """One block of 256 weights by hand: scale 0.5, sub-scales 2, all quants 0 but the first: (q - 32) * 2 * 0.5."""
    block = np.zeros(210, np.uint8)
    block[0] = 5  # the low four bits of the first weight
    block[192:208] = 2
    block[208:210] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "q6.gguf", "llama")
    writer.add_tensor("x", block[None], raw_dtype=Kind.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_array_equal(GGUFFile(tmp_path / "q6.gguf").read("x"), [[-27.0] + [-32.0] * 255])


def test_q4_k(tmp_path: Path):
    """One block of 256 weights by hand: scale 0.5, offset 0.25, eight groups of 32 with 6-bit scales and minima packed in 12 bytes."""
    scales, minima = np.array([1, 2, 3, 4, 5, 6, 40, 63]), np.array([0, 1, 2, 3, 17, 33, 50, 63])
    quants = np.random.default_rng(0).integers(0, 16, (8, 32))
    packed = np.zeros(12, np.uint8)
    packed[:4], packed[4:8] = scales[:4] | (scales[4:] >> 4) << 6, minima[:4] | (minima[4:] >> 4) << 6
    packed[8:] = (scales[4:] & 15) | (minima[4:] & 15) << 4
    nibbles = (quants[0::2] | quants[1::2] << 4).astype(np.uint8)
    block = np.concatenate([np.float16([0.5, 0.25]).view(np.uint8), packed, nibbles.reshape(-1)])
    writer = gguf.GGUFWriter(tmp_path / "q4.gguf", "llama")
    writer.add_tensor("x", block[None], raw_dtype=Kind.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    want = 0.5 * scales[:, None] * quants - 0.25 * minima[:, None]
    np.testing.assert_array_equal(GGUFFile(tmp_path / "q4.gguf").read("x"), want.reshape(1, 256))


def test_an_unsupported_storage_type_is_named(tmp_path: Path):
    with pytest.raises(WeightsError, match=r"model\.gguf: tensor 'token_embd\.weight' is stored as Q5_0"):
        load_target(write(tmp_path / "model.gguf", kind=Kind.Q5_0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, r"llama\.rope\.scaling\.factor"),
        ({"llama.expert_count": 8}, "expert_count 8"),
        ({"llama.rope.dimension_count": 8}, "dimension_count 8"),
        ({"llama.attention.value_length": 8}, "value_length 8"),
        ({"llama.block_count": None}, r"llama\.block_count"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.block_count": 3}, r"blk\.2\.attn_k\.weight.*missing"),
        ({"llama.block_count": 1}, r"blk\.1\.attn_k\.weight.*not part"),
        ({"llama.feed_forward_length": 64}, r"ffn_(gate|up|down)\.weight.*96.*64"),
        ({"llama.attention.head_count_kv": 4}, r"attn_k\.weight.*\(32, 64\).*\(64, 64\)"),
    ],
)
def test_files_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(WeightsError, match=rf"model\.gguf: .*{message}"):
        load_target(write(tmp_path / "model.gguf", changes=changes))


def test_another_architecture_is_named(tmp_path: Path):
    with pytest.raises(WeightsError, match=r"general\.architecture 'gemma3' .*supported: llama, qwen2, qwen3"):
        load_target(write(tmp_path / "model.gguf", architecture="gemma3"))


def test_damaged_files_are_named(tmp_path: Path):
    path = write(tmp_path / "model.gguf")
    whole = path.read_bytes()
    for content in (whole[:-100_000], whole[:1000], whole[:3], b"", b"GARBAGE" * 1000):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=r"model\.gguf: not a readable GGUF file"):
            load_target(path)
    with pytest.raises(WeightsError, match=r"absent\.gguf"):
        load_target(tmp_path / "absent.gguf")


def test_linear_scaling(tmp_path: Path):
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "llama.rope.freq_base": 5000.0}
    rope = load_target(write(tmp_path / "model.gguf", changes=changes)).config.rope
    assert rope == RopeConfig(theta=5000.0, kind="linear", factor=4.0)


def test_llama3_scaling_is_found_again_from_its_factors(tmp_path: Path):
    rope = RopeConfig(theta=500000.0, kind="llama3", factor=32.0)
    factors = inverse_frequencies(RopeConfig(theta=500000.0), 16) / inverse_frequencies(rope, 16)
    assert len(np.unique(np.round(factors, 3))) > 2, "a head width that uses only one band proves nothing"
    metadata = metadata_of(WIDE | {"rope_theta": 500000.0})
    tensors = gguf_tensors(WIDE, tensors_of(WIDE))
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors | {"rope_freqs.weight": factors.astype(np.float32)})
    assert load_target(path).config.rope == rope
    path = write_gguf(tmp_path / "other.gguf", metadata, tensors | {"rope_freqs.weight": (factors**2).astype(np.float32)})
    with pytest.raises(WeightsError, match=r"other\.gguf: tensor 'rope_freqs\.weight'"):
        load_target(path)


def test_stop_ids_of_the_tokenizer(tmp_path: Path):
    target = load_target(write(tmp_path / "model.gguf", changes={"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 5}))
    assert target.config.eos_token_ids == (5, 7)
    assert target.config.bos_token_id == 1
    assert target.config.rms_norm_eps == 1e-5
