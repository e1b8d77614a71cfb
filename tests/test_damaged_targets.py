"""Targets whose files are damaged, hostile or nonsense: a clear error for each, never another exception, and nothing executed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from test_weights_gguf import write
from test_weights_torch_file import Bomb, archive
from tiny_checkpoints import BASE, TORCH_CASE, tensors_of, write_folder

from eagle3_jax.config import ConfigError
from eagle3_jax.target import Target
from eagle3_jax.weights import WeightsError, load_target

REFERENCE = Path(__file__).parent / "reference"
CONFIG = BASE | TORCH_CASE
TENSORS = tensors_of(CONFIG)


def same(a: Target, b: Target) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def shards(folder: Path, *tensors: dict[str, np.ndarray], index: dict[str, str]) -> Path:
    """A folder of shards model-0, model-1, ... and an index."""
    write_folder(folder, CONFIG, {})
    (folder / "model.safetensors").unlink()
    for i, part in enumerate(tensors):
        save_file(part, folder / f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_a_flipped_header_is_refused_or_harmless(mask: int, tmp_path: Path):
    folder = write_folder(tmp_path, CONFIG, TENSORS)
    whole, path = load_target(folder), folder / "model.safetensors"
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    refused = []
    for at in [*range(8), *range(8, size, 61)]:
        flipped = bytearray(content)
        flipped[at] ^= mask
        path.write_bytes(flipped)
        try:
            assert same(load_target(folder), whole), f"byte {at}: another model, without a word"
        except (WeightsError, ConfigError) as error:
            refused.append(str(error))
    assert len(refused) > 10
    assert all(str(folder) in message for message in refused)


@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_flipped_gguf_headers_raise_nothing_else(mask: int, tmp_path: Path):
    """A flipped digit of a number may be a valid number; anything that is refused names the file."""
    path = write(tmp_path / "model.gguf", CONFIG | {"intermediate_size": 32})
    content = path.read_bytes()
    refused = []
    for at in [*range(24), *range(24, 2000, 37)]:
        flipped = bytearray(content)
        flipped[at] ^= mask
        path.write_bytes(flipped)
        try:
            load_target(path)
        except (WeightsError, ConfigError) as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all("model.gguf" in message for message in refused)


def test_truncated_at_every_scale(tmp_path: Path):
    folder = write_folder(tmp_path, CONFIG, TENSORS)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(WeightsError, match=r"model\.safetensors"):
            load_target(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path):
    key = "model.norm.weight"
    folder = shards(
        tmp_path, TENSORS, {key: TENSORS[key] + 1}, index=dict.fromkeys(TENSORS, "model-0.safetensors") | {key: "model-1.safetensors"}
    )
    with pytest.raises(WeightsError, match=r"model-0\.safetensors: tensor 'model\.norm\.weight' is in model-1\.safetensors too"):
        load_target(folder)


def test_an_index_may_forget_a_tensor_but_hides_none(tmp_path: Path):
    index = dict.fromkeys(TENSORS, "model-0.safetensors")
    del index["model.norm.weight"]
    single = load_target(write_folder(tmp_path / "single", CONFIG, TENSORS))
    assert same(load_target(shards(tmp_path / "forgets", TENSORS, index=index)), single)
    with pytest.raises(WeightsError, match=r"'score\.weight' is not part of this model"):
        load_target(shards(tmp_path / "hides", TENSORS | {"score.weight": np.ones(3, np.float32)}, index=index))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors", "..", "", 7])
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_cannot_leave_its_folder(name: Any, kind: str, tmp_path: Path):
    folder = write_folder(tmp_path / "model", CONFIG, TENSORS)
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, name)}))
    with pytest.raises(WeightsError, match=r"index\.json: .*refused"):
        load_target(folder)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {', "\x00"])
def test_an_index_that_is_none(content: str, tmp_path: Path):
    folder = write_folder(tmp_path, CONFIG, TENSORS)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises((WeightsError, ConfigError), match=r"index\.json: "):
        load_target(folder)


def test_a_target_in_torchs_format(tmp_path: Path):
    """Alone and as a shard; the same weights as in safetensors."""
    half = {key: array.astype(np.float16) for key, array in TENSORS.items()}
    want = load_target(write_folder(tmp_path / "safetensors", CONFIG, half))
    for name in ("pytorch_model.bin", "pytorch_model-00001-of-00001.bin"):
        folder = write_folder(tmp_path / name, CONFIG, {})
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes((REFERENCE / "torch_target.bin").read_bytes())
        if "of" in name:
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, name)}))
        assert same(load_target(folder), want)


def test_a_pickle_with_code_is_never_run(tmp_path: Path):
    folder, victim = write_folder(tmp_path, CONFIG, {}), tmp_path / "victim"
    (folder / "model.safetensors").unlink()
    archive(folder / "pytorch_model.bin", pickle.dumps({"model.norm.weight": Bomb(victim)}))
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin: .*refused"):
        load_target(folder)
    assert not victim.exists()


NO_SIZE, NO_NUMBER, NO_FLAG, NO_ID = ("8", -1, 0, 1.5, [], {}), ("8", -1, 0, [], {}, True), ("false", 2, []), ("</s>", 1.5, ["a"], {}, True)
WRONG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"), NO_SIZE),
    "num_hidden_layers": (*NO_SIZE, 10**9),
    **dict.fromkeys(("max_position_embeddings", "rms_norm_eps", "rope_theta"), NO_NUMBER),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), NO_FLAG),
    **dict.fromkeys(("eos_token_id", "bos_token_id"), NO_ID),
    "rope_scaling": ("linear", [1], {"type": "linear", "factor": "4"}, {"type": "linear", "factor": 0}, {"type": ["linear"]}),
    "rope_parameters": (7, {"rope_theta": -1.0}),
}


@pytest.mark.parametrize("key", WRONG)
def test_nonsense_in_the_configuration_names_file_and_key(key: str, tmp_path: Path):
    folder = write_folder(tmp_path, CONFIG, TENSORS)
    for value in WRONG[key]:
        (folder / "config.json").write_text(json.dumps(CONFIG | {key: value}))
        with pytest.raises((ConfigError, WeightsError)) as error:
            load_target(folder)
        assert str(folder) in str(error.value), value
