"""EAGLE-3 heads in the official dialect: written, read back, and refused when anything does not fit."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle3_jax import target as target_module
from eagle3_jax.config import ConfigError, DraftConfig, RopeConfig, TargetConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import fill, named_variables
from eagle3_jax.target import Target
from eagle3_jax.weights import WeightsError, load_draft, load_head, save_head
from eagle3_jax.weights.dialects import DIALECTS, head_rows

TARGET = TargetConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_layers=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    max_position=64,
    rope=RopeConfig(theta=5000.0),
)
KEPT = [0, 3, 5, 9]
NO_TAPS: dict[str, Any] = dict.fromkeys(("eagle_taps", "eagle_aux_hidden_state_layer_ids", "eagle_config"))
OFFICIAL = head_rows(DraftConfig.for_target(TARGET, len(KEPT)), "midlayer.")


def make_head(kept: list[int] | None = None, target: TargetConfig = TARGET, **changes: Any) -> Eagle3Draft:
    """A random head that keeps the given target ids."""
    ids = KEPT if kept is None else kept
    head, random = Eagle3Draft(DraftConfig.for_target(target, len(ids), **changes)), np.random.default_rng(0)
    values = {
        name: jnp.asarray(random.normal(size=variable.get_value().shape).astype(np.float32)) for name, variable in named_variables(head)
    }
    return fill(head, values | {"d2t": jnp.asarray(np.array(ids, np.int32))})


def edit(folder: Path, tensors: dict[str, Any] | None = None, without: tuple[str, ...] = (), config: dict[str, Any] | None = None) -> None:
    """Changes a saved head in place; a config key set to None is taken out."""
    if tensors or without:
        changed = load_file(folder / "model.safetensors") | (tensors or {})
        save_file({key: value for key, value in changed.items() if key not in without}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_head(make_head(), tmp_path / "head", dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip(dtype: str, tmp_path: Path):
    head = make_head(rope=RopeConfig(theta=1234.0, kind="llama3", factor=8.0), num_kv_heads=2, intermediate_size=20)
    back = load_head(save_head(head, tmp_path / "head", dtype=dtype), TARGET)
    assert back.config == head.config
    for (name, before), (_, after) in zip(named_variables(head), named_variables(back), strict=True):
        a, b = before.get_value(), after.get_value()
        expected = np.asarray(a) if name == "d2t" else np.asarray(a).astype(dtype).astype(np.float32)
        assert b.dtype == a.dtype, name
        np.testing.assert_array_equal(b, expected, err_msg=name)


def test_what_is_on_disk(folder: Path):
    head, tensors = make_head(), load_file(folder / "model.safetensors")
    assert set(tensors) == {row.key for row in OFFICIAL} | {"d2t", "t2d"}
    D, F, A, U = 8, 12, 24, 4
    shapes = {"fc": (D, A), "midlayer.self_attn.q_proj": (12, 2 * D), "midlayer.self_attn.k_proj": (6, 2 * D), "lm_head": (U, D)}
    shapes |= {"midlayer.self_attn.o_proj": (D, 12), "midlayer.mlp.gate_proj": (F, D), "midlayer.mlp.down_proj": (D, F), "norm": (D,)}
    for key, shape in shapes.items():
        assert tensors[f"{key}.weight"].shape == shape
    np.testing.assert_array_equal(tensors["midlayer.mlp.up_proj.weight"], head.up[...].T)
    config = json.loads((folder / "config.json").read_text())
    expected = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": 4}
    expected |= {"vocab_size": 10, "head_dim": 6, "eagle_taps": [2, 4, 5], "rope_theta": 5000.0, "torch_dtype": "float32"}
    assert expected.items() <= config.items()
    assert config["rope_parameters"]["rope_theta"] == 5000.0
    # The official code would read the embedding from this file, which holds none, instead of from the target.
    assert "target_hidden_size" not in config
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_float16_is_upcast_and_computed_in_float32(tmp_path: Path):
    folder = save_head(make_head(), tmp_path / "head", dtype="float16")
    assert load_file(folder / "model.safetensors")["fc.weight"].dtype == np.float16
    assert load_head(folder, TARGET).dtype == jnp.float32
    assert load_head(folder, TARGET, dtype="bfloat16").dtype == jnp.bfloat16
    with pytest.raises(WeightsError, match="dtype 'float16'"):
        load_head(folder, TARGET, dtype="float16")


# --- the vocabulary map ---


def test_d2t_is_an_offset_on_disk_and_an_id_in_memory(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(tensors["d2t"], [0, 2, 3, 6])
    assert tensors["d2t"].dtype == np.int64
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), KEPT)
    assert tensors["t2d"].dtype == np.bool_
    assert tensors["t2d"].shape == (10,)
    d2t = load_head(folder, TARGET).d2t[...]
    assert d2t.dtype == jnp.int32
    np.testing.assert_array_equal(d2t, KEPT)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": np.array([0, 2, 3, 7])}, r"'d2t' sends draft id 3 to 10, outside the vocabulary of 10"),
        ({"d2t": np.array([-1, 2, 3, 6])}, r"'d2t' sends draft id 0 to -1, outside"),
        ({"d2t": np.array([0, 2, 3, 2**40])}, r"'d2t' sends draft id 3 to 1099511627779, outside"),
        ({"d2t": np.array(KEPT)}, r"outside the vocabulary"),  # absolute ids: 3 + 9
        ({"d2t": np.array([0, 2, 1, 6])}, r"ids 1 and 2 to 3 and 3: ids must ascend"),
        ({"d2t": np.array([0, 2, 3])}, r"'d2t' is int64 \[3\], expected integers \[4\]"),
        ({"d2t": np.array([0, 2, 3, 6], np.float32)}, r"'d2t' is float32"),
        ({"d2t": np.array([0, 2, 3, 5])}, r"'t2d' and 'd2t' disagree"),
        ({"t2d": np.arange(10) < 4}, r"'t2d' and 'd2t' disagree"),
        ({"t2d": np.arange(10) < 3}, r"disagree: 3 and 4 ids"),
        ({"t2d": np.ones(9, np.bool_)}, r"'t2d' is bool \[9\], expected bool \[10\]"),
    ],
)
def test_wrong_maps(tensors: dict[str, np.ndarray], message: str, folder: Path):
    edit(folder, tensors)
    with pytest.raises(WeightsError, match=message):
        load_head(folder, TARGET)


@pytest.mark.parametrize("key", ["d2t", "t2d"])
def test_a_reduced_vocabulary_needs_its_map(key: str, folder: Path):
    edit(folder, without=(key,))
    with pytest.raises(WeightsError, match=rf"'{key}' is missing; a draft vocabulary of 4 in 10"):
        load_head(folder, TARGET)


def test_a_full_vocabulary_needs_no_map(tmp_path: Path):
    folder = save_head(make_head(list(range(10))), tmp_path / "head", dtype="float32")
    assert not {"d2t", "t2d"} & load_file(folder / "model.safetensors").keys()
    np.testing.assert_array_equal(load_head(folder, TARGET).d2t[...], np.arange(10))
    edit(folder, {"d2t": np.zeros(10, np.int64), "t2d": np.ones(10, np.bool_)})
    np.testing.assert_array_equal(load_head(folder, TARGET).d2t[...], np.arange(10))
    edit(folder, {"d2t": np.array([0] * 9 + [1])})
    with pytest.raises(WeightsError, match="outside"):
        load_head(folder, TARGET)


@pytest.mark.parametrize("ids", [[0, 3, 5, 10], [0, 5, 3, 9], [0, 0, 0, 0]])
def test_a_wrong_map_in_memory_is_not_saved(ids: list[int], tmp_path: Path):
    with pytest.raises(WeightsError, match="d2t"):
        save_head(make_head(ids), tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


# --- keys and shapes ---


def test_every_deleted_key_is_named(folder: Path):
    whole = load_file(folder / "model.safetensors")
    for key in whole:
        save_file({k: v for k, v in whole.items() if k != key}, folder / "model.safetensors")
        with pytest.raises(WeightsError, match=rf"'{key}' is missing"):
            load_head(folder, TARGET)


@pytest.mark.parametrize("key", ["midlayer.self_attn.q_proj.bias", "fc.bias", "fc_norm.7.weight", "mask_hidden", "verifier_norm.weight"])
def test_an_extra_key_is_named(key: str, folder: Path):
    edit(folder, {key: np.zeros(8, np.float32)})
    with pytest.raises(WeightsError, match=rf"'{key}' is not part"):
        load_head(folder, TARGET)


def test_every_wrong_shape_is_named(folder: Path):
    whole = load_file(folder / "model.safetensors")
    for row in OFFICIAL:
        save_file(whole | {row.key: np.zeros((5, 5), np.float32)}, folder / "model.safetensors")
        with pytest.raises(WeightsError, match=rf"model\.safetensors: tensor '{row.key}' has shape \(5, 5\), expected"):
            load_head(folder, TARGET)


def test_missing_and_truncated_files_are_named(folder: Path):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"model\.safetensors.*truncated"):
        load_draft(folder, TARGET)
    path.unlink()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors"):
        load_draft(folder, TARGET)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_draft(folder, TARGET)
    with pytest.raises(WeightsError, match="no such file or folder"):
        load_draft(folder / "nothing", TARGET)


# --- another target, another kind of head ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, r"whose hidden size is 8; the given target's is 16"),
        ({"vocab_size": 12}, r"whose vocabulary is 10; the given target's is 12"),
        ({"num_layers": 9}, r"whose number of blocks is 8; the given target's is 9"),
    ],
)
def test_a_head_for_another_target_is_refused_with_both_numbers(changes: dict[str, int], message: str, folder: Path):
    with pytest.raises(ConfigError, match=rf"config\.json: this head is for a target {message}"):
        load_draft(folder, dataclasses.replace(TARGET, **changes))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"norm_output": "yes"}, "norm_output must be true or false"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "not an EAGLE-3 head"),
        ({"sliding_window": 512}, "sliding_window 512"),
        ({"target_layer_ids": [1, 9, 17, 25, 33]}, "target_layer_ids"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"model_type": "qwen3"}, "model_type 'qwen3'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"draft_vocab_size": 11}, "draft_vocab_size 11"),
        ({"hidden_size": 6, "target_hidden_size": 8}, "needs an embedding of its own"),
        ({"intermediate_size": None}, "intermediate_size"),
    ],
)
def test_heads_that_are_refused(config: dict[str, Any], message: str, folder: Path):
    edit(folder, config=config)
    with pytest.raises(ConfigError, match=message):
        load_head(folder, TARGET)


# --- taps ---


@pytest.fixture(scope="module")
def powers_target() -> Target:
    """Block k adds 10^k to every component: the state entering block k is the number written with k ones."""
    target = Target(dataclasses.replace(TARGET, mlp_bias=True))
    values = {name: jnp.zeros(variable.get_value().shape) for name, variable in named_variables(target)}
    return fill(target, values | {f"blocks.{k}.down_bias": jnp.full(8, 10.0**k) for k in range(8)})


@pytest.fixture(scope="module")
def entering(powers_target: Target) -> np.ndarray:
    """[8]: what forward gives for tap 0, 1, ... 7."""

    @jax.jit
    def features_of(target: Target) -> jax.Array:
        token = jnp.zeros((1, 1), jnp.int32)
        return target_module.forward(target, token, token, jnp.ones((1, 1, 1), bool), taps=tuple(range(8))).features

    features = np.asarray(features_of(powers_target)).reshape(8, 8)
    assert (features == features[:, :1]).all()
    return features[:, 0]


@pytest.mark.parametrize(
    ("taps", "numbers"),
    [(None, [11, 1111, 11111]), ((0, 1, 7), [0, 1, 1111111]), ((2, 3, 6), [11, 111, 111111])],
)
def test_taps_are_stored_and_mean_the_state_entering_the_block(
    taps: tuple[int, ...] | None, numbers: list[int], powers_target: Target, entering: np.ndarray, tmp_path: Path
):
    made = make_head(target=powers_target.config, taps=taps)
    able = [dialect for dialect in DIALECTS.values() if not dialect.reasons(made.config)]
    assert len(able) == (2 if taps == (0, 1, 7) else 3)
    for dialect in able:
        folder = save_head(made, tmp_path / dialect.name, dialect=dialect.name, target_name="some/target")
        head = load_draft(folder, powers_target)
        assert head.config.taps == (taps or (2, 4, 5))
        np.testing.assert_array_equal(entering[list(head.config.taps)], numbers)


def test_a_head_without_stored_taps_gets_the_official_default_or_those_named(folder: Path):
    edit(folder, config=NO_TAPS | {"target_num_hidden_layers": None})
    assert load_head(folder, TARGET).config.taps == (2, 4, 5)
    assert load_head(folder, dataclasses.replace(TARGET, num_layers=30)).config.taps == (2, 15, 27)
    assert load_head(folder, TARGET, taps=(1, 4, 6)).config.taps == (1, 4, 6)
    with pytest.raises(ConfigError, match=r"\(1, 4, 9\).*0\.\.7"):
        load_head(folder, TARGET, taps=(1, 4, 9))
    with pytest.raises(WeightsError, match=r"fc\.weight.*\(8, 24\).*\(8, 16\)"):
        load_head(folder, TARGET, taps=(1, 4))


def test_stored_taps_that_do_not_fit_are_refused(folder: Path):
    with pytest.raises(ConfigError, match=r"made with taps \(2, 4, 5\), asked for \(1, 3, 4\)"):
        load_head(folder, TARGET, taps=(1, 3, 4))
    edit(folder, config=NO_TAPS | {"eagle_taps": [2, 15, 27], "target_num_hidden_layers": None})
    with pytest.raises(ConfigError, match=r"\(2, 15, 27\).*0\.\.7"):
        load_head(folder, TARGET)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("ids", "given", "expected"),
    [
        ([2, 4, 5], None, (2, 4, 5)),  # entering ids, the default
        ([1, 3, 4], None, (2, 4, 5)),  # the same tensors as output-of-block ids
        ([1, 3, 5], (1, 3, 5), (1, 3, 5)),
        ([0, 2, 4], (1, 3, 5), (1, 3, 5)),
    ],
)
def test_ids_of_either_convention(ids: list[int], given: tuple[int, ...] | None, expected: tuple[int, ...], nested: bool, folder: Path):
    key = "eagle_aux_hidden_state_layer_ids"
    edit(folder, config={"eagle_taps": None, key: None if nested else ids, "eagle_config": {key: ids} if nested else None})
    assert load_head(folder, TARGET, taps=given).config.taps == expected


def test_ids_that_could_mean_either_are_not_guessed(folder: Path):
    edit(folder, config=NO_TAPS | {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]})
    with pytest.raises(ConfigError, match=r"\(1, 3, 5\).*name the taps"):
        load_head(folder, TARGET)
    edit(folder, config={"eagle_taps": [2, 4, 5]})
    with pytest.raises(ConfigError, match=r"\(1, 3, 5\)"):
        load_head(folder, TARGET)


# --- the draft's rotary embedding ---


def test_the_rotary_base_is_the_heads_own(folder: Path):
    """Not the target's: 10000 where the head's config names none."""
    assert load_head(folder, dataclasses.replace(TARGET, rope=RopeConfig(theta=77.0))).config.rope == RopeConfig(theta=5000.0)
    assert load_head(folder, TARGET, rope_theta=10000.0).config.rope == RopeConfig(theta=10000.0)
    edit(folder, config={"rope_theta": None, "rope_parameters": None, "rope_scaling": None})
    assert load_head(folder, TARGET).config.rope == RopeConfig(theta=10000.0)
    edit(folder, config={"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert load_head(folder, TARGET).config.rope == RopeConfig(theta=300.0, kind="linear", factor=2.0)
    assert load_head(folder, TARGET, rope_theta=10000.0).config.rope == RopeConfig(theta=10000.0)


# --- writing ---


def test_a_head_is_not_overwritten_by_accident(folder: Path):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(WeightsError, match="overwrite=True"):
        save_head(make_head([1, 2, 3, 4]), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    (folder / "README.md").write_text("kept")
    save_head(make_head([1, 2, 3, 4]), folder, overwrite=True)
    np.testing.assert_array_equal(load_head(folder, TARGET).d2t[...], [1, 2, 3, 4])
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["head"]
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    with pytest.raises(WeightsError, match="not empty"):
        save_head(make_head(), folder)
    (folder / "README.md").unlink()
    assert load_head(save_head(make_head(), folder), TARGET).config == make_head().config


def test_nothing_is_left_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import safetensors.numpy

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_head(make_head(), tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_overwrite_leaves_no_mixture(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """New weights beside the old configuration would load and be wrong: the folder must refuse instead."""
    replace = os.replace

    def fail_at_the_configuration(source: Path, destination: Path) -> None:
        if Path(destination).name == "config.json":
            raise OSError("power cut")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", fail_at_the_configuration)
    with pytest.raises(OSError, match="power cut"):
        save_head(make_head(rope=RopeConfig(theta=9.0)), folder, overwrite=True)
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_head(folder, TARGET)


def test_extra_config_is_kept_but_cannot_contradict(tmp_path: Path):
    folder = save_head(make_head(), tmp_path / "head", extra_config={"eos_token_id": 2, "trained_on": "x", "vocab_size": 10})
    assert {"eos_token_id": 2, "trained_on": "x"}.items() <= json.loads((folder / "config.json").read_text()).items()
    with pytest.raises(WeightsError, match="vocab_size is 11, but the head's own is 10"):
        save_head(make_head(), tmp_path / "other", extra_config={"vocab_size": 11})
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (np.inf, "bfloat16"), (70000.0, "float16")])
def test_weights_that_are_not_finite_are_not_saved(value: float, dtype: str, tmp_path: Path):
    head = make_head()
    values = {name: variable.get_value() for name, variable in named_variables(head)}
    bad = fill(head, values | {"fc": values["fc"].at[3, 2].set(value)})
    with pytest.raises(WeightsError, match=rf"'fc\.weight' is not finite in {dtype}"):
        save_head(bad, tmp_path / "head", dtype=dtype)
    with pytest.raises(WeightsError, match="dtype 'int8'"):
        save_head(head, tmp_path / "head", dtype="int8")
    assert list(tmp_path.iterdir()) == []


# --- real files ---


def test_the_official_head(golden: Path):
    """float16 weights, a config without taps and without a rotary base."""
    from eagle3_jax.weights import load_target

    target = load_target(golden / "target")
    head = load_draft(golden / "head", target)
    assert head.config.taps == (2, 4, 5)
    assert head.config.rope == RopeConfig(theta=10000.0)
    assert head.dtype == jnp.float32
    stored = load_file(golden / "head" / "model.safetensors")
    np.testing.assert_array_equal(head.d2t[...], np.flatnonzero(stored["t2d"]))
    np.testing.assert_array_equal(head.fc[...], stored["fc.weight"].astype(np.float32).T)


def test_a_trained_head_is_written_back_byte_for_byte(shared_data: Path, tmp_path: Path):
    source = shared_data / "baseline_head"
    raw = json.loads((source / "config.json").read_text())
    target = dataclasses.replace(TARGET, vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"], num_layers=30)
    head = load_draft(source, target)
    assert head.config.taps == (2, 15, 27)
    folder = save_head(head, tmp_path / "head")
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    for key, array in before.items():
        assert array.dtype == after[key].dtype, key
        assert array.tobytes() == after[key].tobytes(), key


def test_a_built_in_head_that_is_not_installed_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from eagle3_jax.weights import builtin

    monkeypatch.setattr(builtin, "HEADS", tmp_path)
    with pytest.raises(WeightsError, match=r"smollm2-135m.*not part of this installation"):
        load_draft("smollm2-135m", TARGET)
    save_head(make_head(), tmp_path / "smollm2-135m")
    assert load_draft("smollm2-135m", TARGET).config.taps == (2, 4, 5)
    with pytest.raises(ConfigError, match="number of blocks is 8; the given target's is 9"):
        load_draft("smollm2-135m", dataclasses.replace(TARGET, num_layers=9))
    with pytest.raises(ValueError, match="mesh: expected one with the axes data, fsdp, tensor"):
        load_draft("smollm2-135m", TARGET, mesh="any")  # pyright: ignore[reportArgumentType]
