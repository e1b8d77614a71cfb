"""Targets in Hugging Face folders: Hugging Face's logits, and every way a checkpoint can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import CASES, config_of, tensors_of, tokens_of, write_folder

from eagle3_jax import target as target_module
from eagle3_jax.config import ConfigError
from eagle3_jax.target import Target
from eagle3_jax.weights import WeightsError, load_target

REFERENCE = Path(__file__).parent / "reference"
ANY = "llama3_two_kv_heads"


def run(target: Target, tokens: np.ndarray, taps: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """(logits [T, V], features [T, A]) of one causal pass over one row."""
    T = len(tokens)

    @jax.jit
    def run_one(target: Target, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        mask = jnp.tril(jnp.ones((1, T, T), bool))
        out = target_module.forward(target, tokens_BT, jnp.arange(T)[None], mask, taps=taps)
        return target_module.logits(target, out.hidden)[0], out.features[0]

    logits, features = run_one(target, jnp.asarray(tokens, jnp.int32)[None])
    return np.asarray(logits), np.asarray(features)


def folder_of(tmp_path: Path, case: str = ANY, changes: dict[str, Any] | None = None) -> Path:
    return write_folder(tmp_path / "model", config_of(case) | (changes or {}), tensors_of(config_of(case)))


def rewrite(folder: Path, tensors: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_logits_are_hugging_faces(case: str, tmp_path: Path):
    config = config_of(case)
    target = load_target(folder_of(tmp_path, case))
    logits, tap = run(target, tokens_of(config), taps=(1,))
    reference = np.load(REFERENCE / "hf_tiny.npz")
    assert np.abs(reference[f"{case}.logits"]).max() > 1, "a reference of zeros would prove nothing"
    np.testing.assert_allclose(logits, reference[f"{case}.logits"], atol=1e-4)
    np.testing.assert_allclose(tap, reference[f"{case}.tap1"], atol=1e-4)


def test_weights_are_transposed_and_the_tied_head_is_absent(tmp_path: Path):
    case = "biases_one_kv_head_tied"
    tensors, target = tensors_of(config_of(case)), load_target(folder_of(tmp_path, case))
    np.testing.assert_array_equal(target.embed[...], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(target.blocks[1].qkv[:, 0, -2], tensors["model.layers.1.self_attn.k_proj.weight"].T)
    np.testing.assert_array_equal(target.blocks[1].down_bias[...], tensors["model.layers.1.mlp.down_proj.bias"])
    assert not hasattr(target, "head")


@pytest.mark.parametrize("stored", [np.float16, jnp.bfloat16, np.float64])
def test_other_stored_types_are_converted(stored: Any, tmp_path: Path):
    tensors = {key: array.astype(stored) for key, array in tensors_of(config_of(ANY)).items()}
    folder = write_folder(tmp_path, config_of(ANY), tensors)
    for name in ("float32", "bfloat16"):
        target = load_target(folder, dtype=name)
        assert target.dtype == name
        np.testing.assert_array_equal(target.head[...], tensors["lm_head.weight"].T.astype(name))


def test_loaded_weights_do_not_read_the_file_again(tmp_path: Path):
    folder = folder_of(tmp_path)
    target = load_target(folder)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-4096, 2)
        file.write(bytes(4096))
    for key, value in (("model.embed_tokens.weight", target.embed[...]), ("model.norm.weight", target.norm[...])):
        np.testing.assert_array_equal(value, tensors_of(config_of(ANY))[key])


def shard(folder: Path, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    """Three shards with an index in place of the single file; returns the index's map."""
    names = {key: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, key in enumerate(tensors)}
    for name in set(names.values()):
        save_file({key: tensors[key] for key in tensors if names[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "model.safetensors").unlink(missing_ok=True)
    return names


def test_shards_equal_the_single_file_and_strays_are_ignored(tmp_path: Path):
    folder = folder_of(tmp_path)
    single = load_target(folder)
    shard(folder, tensors_of(config_of(ANY)))
    save_file({"model.norm.weight": np.zeros(48, np.float32), "junk": np.zeros(3, np.float32)}, folder / "model-00009-of-00009.safetensors")
    (folder / "model-00004-of-00003.safetensors").write_bytes(b"not even safetensors")
    sharded = load_target(folder)
    assert jax.tree.structure(single) == jax.tree.structure(sharded)
    for a, b in zip(jax.tree.leaves(single), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_missing_shard_is_named(tmp_path: Path):
    folder = folder_of(tmp_path)
    shard(folder, tensors_of(config_of(ANY)))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00003\.safetensors.*missing"):
        load_target(folder)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path):
    folder = folder_of(tmp_path)
    tensors = tensors_of(config_of(ANY))
    names = shard(folder, tensors)
    key = "model.layers.1.mlp.up_proj.weight"
    save_file({k: tensors[k] for k in tensors if names[k] == names[key] and k != key}, folder / names[key])
    with pytest.raises(WeightsError, match=rf"{names[key]}.*{key}"):
        load_target(folder)


def test_a_truncated_file_is_named(tmp_path: Path):
    folder = folder_of(tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (len(whole) - 1, 100, 0):
        path.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"model\.safetensors.*truncated"):
            load_target(folder)


def test_files_that_are_not_there(tmp_path: Path):
    with pytest.raises(WeightsError, match="no such file or folder"):
        load_target(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_target(tmp_path)
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        load_target(folder)
    (folder / "model.txt").write_text("x")
    with pytest.raises(WeightsError, match=r"model\.txt: expected"):
        load_target(folder / "model.txt")


@pytest.mark.parametrize("case", ["biases_one_kv_head_tied", ANY])
def test_every_deleted_key_is_named(case: str, tmp_path: Path):
    tensors = tensors_of(config_of(case))
    folder = write_folder(tmp_path, config_of(case), tensors)
    for key in tensors:
        rewrite(folder, {k: v for k, v in tensors.items() if k != key})
        with pytest.raises(WeightsError, match=rf"'{key}' is missing$"):
            load_target(folder)


@pytest.mark.parametrize("key", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight"])
def test_an_extra_key_is_named(key: str, tmp_path: Path):
    folder = folder_of(tmp_path)
    rewrite(folder, tensors_of(config_of(ANY)) | {key: np.zeros(64, np.float32)})
    with pytest.raises(WeightsError, match=rf"{key}.*not part"):
        load_target(folder)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path):
    folder = folder_of(tmp_path)
    rewrite(folder, tensors_of(config_of(ANY)) | {"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    load_target(folder)


@pytest.mark.parametrize("key", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_wrong_shape_is_named_with_both_shapes(key: str, tmp_path: Path):
    folder = folder_of(tmp_path)
    tensors = tensors_of(config_of(ANY))
    right = tensors[key].shape
    rewrite(folder, tensors | {key: np.zeros((7, *right[1:]), np.float32)})
    with pytest.raises(WeightsError) as error:
        load_target(folder)
    for part in ("model.safetensors", key, str((7, *right[1:])), str(right)):
        assert part in str(error.value)


def test_a_square_weight_stored_the_other_way_is_not_noticed_by_shape_but_is_by_the_logits(tmp_path: Path):
    """The shape check alone cannot see a missing transpose where D = N·H; the reference logits can."""
    case = "no_head_dim"
    tensors = tensors_of(config_of(case))
    key = "model.layers.0.self_attn.q_proj.weight"
    folder = write_folder(tmp_path, config_of(case), tensors | {key: np.ascontiguousarray(tensors[key].T)})
    logits, _ = run(load_target(folder), tokens_of(config_of(case)))
    assert np.abs(logits - np.load(REFERENCE / "hf_tiny.npz")[f"{case}.logits"]).max() > 1e-2


def test_unsupported_stored_types_are_named(tmp_path: Path):
    folder = folder_of(tmp_path)
    tensors = tensors_of(config_of(ANY))
    for array in (np.zeros(48, np.int32), np.zeros(48, jnp.float8_e4m3fn)):
        rewrite(folder, tensors | {"model.norm.weight": array})
        with pytest.raises(WeightsError, match=r"model\.safetensors: tensor 'model\.norm\.weight' has dtype"):
            load_target(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        load_target(folder_of(tmp_path, changes=changes))


def test_a_tied_checkpoint_may_store_its_head_again_but_not_another(tmp_path: Path):
    case = "biases_one_kv_head_tied"
    tensors = tensors_of(config_of(case))
    folder = folder_of(tmp_path, case)
    rewrite(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    load_target(folder)
    rewrite(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(WeightsError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load_target(folder)


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "tokenizer", "expected"),
    [
        (2, None, {}, (2,)),
        (None, None, {}, ()),
        ([2, 7], 9, {}, (2, 7, 9)),
        (2, [2, 5], {"eos_token": "<end>", "added_tokens_decoder": {"11": {"content": "<end>"}}}, (2, 5, 11)),
        (2, None, {"eos_token": {"content": "<stop>"}}, (2, 12)),
        (2, None, {"eos_token": "b"}, (2, 4)),
        (2, None, {"eos_token": None}, (2,)),
    ],
)
def test_stop_ids_are_the_union(config_eos: Any, generation_eos: Any, tokenizer: dict[str, Any], expected: tuple[int, ...], tmp_path: Path):
    folder = folder_of(tmp_path, changes={"eos_token_id": config_eos})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    if tokenizer:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        added = [{"id": 12, "content": "<stop>"}]
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"a": 3, "b": 4}}}))
    assert load_target(folder).config.eos_token_ids == expected


def test_arguments_that_are_refused(tmp_path: Path):
    folder = folder_of(tmp_path)
    with pytest.raises(ValueError, match="mesh: expected one with the axes data, fsdp, tensor"):
        load_target(folder, mesh="any mesh")  # pyright: ignore[reportArgumentType]
    for dtype in ("float64", "float16", "int8"):
        with pytest.raises(WeightsError, match=f"dtype '{dtype}'"):
            load_target(folder, dtype=dtype)


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    folder, asked = folder_of(tmp_path), []

    def download(repository: str, **options: Any) -> str:
        asked.append((repository, options))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_target("owner/name-1.5").config.num_layers == 2
    assert asked[0][0] == "owner/name-1.5"
    assert "*.safetensors" in asked[0][1]["allow_patterns"]


def test_a_gguf_file_of_a_hub_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    asked = []

    def download(repository: str, **options: Any) -> str:
        asked.append((repository, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(WeightsError, match=r"name-Q4_K_M\.gguf: no such file"):
        load_target("owner/name/name-Q4_K_M.gguf")
    assert asked == [("owner/name", ["name-Q4_K_M.gguf"])]


def test_torch_files_are_downloaded_only_where_there_is_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    asked = []

    def download(repository: str, **options: Any) -> str:
        asked.append("*.bin" in options["allow_patterns"])
        (tmp_path / "config.json").write_text(json.dumps(config_of(ANY)))
        if asked[-1]:
            (tmp_path / "pytorch_model.bin").write_bytes((REFERENCE / "torch_head.bin").read_bytes())
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(WeightsError, match=r"embed_tokens\.weight' is missing"):
        load_target("owner/name")
    assert asked == [False, True]


def test_a_hub_id_without_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def download(repository: str, **options: Any) -> str:
        raise OSError("name resolution failed")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(WeightsError, match=r"owner/name: .*hub.*name resolution failed"):
        load_target("owner/name")
    for not_an_id in ("owner/name/more", "just-a-name", "./owner/name", "owner/model.gguf"):
        with pytest.raises(WeightsError, match="no such file or folder"):
            load_target(not_an_id)
