"""Heads in every dialect: each written in each, read back bit for bit; told apart by content; refused by name."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_weights_heads import KEPT, TARGET, edit, make_head

from eagle3_jax.config import TAP_IDS, ConfigError, RopeConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import fill, named_variables
from eagle3_jax.target import Target
from eagle3_jax.weights import WeightsError, load_draft, load_head, save_head
from eagle3_jax.weights.dialects import DIALECTS, detect, suited

NARROW = {"hidden_size": 6, "own_embedding": True}
LATER = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
HEADS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "plain": (KEPT, {}),
    "whole vocabulary": (list(range(10)), {"taps": (1, 3, 6)}),
    "own embedding": (KEPT, {"own_embedding": True, "rope": RopeConfig(theta=77.0)}),
    "narrower": (KEPT, NARROW),
    "one norm before fc": (KEPT, {"norm_before_fc": True, "norm_before_residual": True}),
    "dynamic rope": (KEPT, {"rope": RopeConfig(kind="dynamic", factor=4.0, original_max_position=16), "max_position": 64}),
    "a norm per tap": (KEPT, {"fc_norm": True, "norm_output": True, "taps": (1, 2, 4, 7), **NARROW}),
}


def save(head: Eagle3Draft, folder: Path, dialect: str, **options: Any) -> Path:
    return save_head(head, folder, **{"dtype": "float32", "dialect": dialect, "target_name": "some/target", **options})


def carries(dialect: str, head: Eagle3Draft) -> bool:
    return not DIALECTS[dialect].refuse(head.config)


def assert_same(a: Eagle3Draft, b: Eagle3Draft) -> None:
    assert a.config == b.config
    for (name, x), (_, y) in zip(named_variables(a), named_variables(b), strict=True):
        assert np.asarray(x.get_value()).tobytes() == np.asarray(y.get_value()).tobytes(), name


@pytest.mark.parametrize("kind", HEADS)
def test_every_pair_of_dialects_round_trips_bit_for_bit(kind: str, tmp_path: Path):
    kept, changes = HEADS[kind]
    head = make_head(kept, **changes)
    able = [dialect for dialect in DIALECTS if carries(dialect, head)]
    assert able == list(DIALECTS) or kind in ("one norm before fc", "a norm per tap")
    for one, other in itertools.product(able, able):
        folders = tmp_path / f"{one}-{other}", tmp_path / f"{one}-{other}-back"
        there = load_head(save(head, folders[0], other), TARGET)
        assert_same(there, head)
        back = save(there, folders[1], one)
        assert_same(load_head(back, TARGET), head)
        direct = save(head, tmp_path / f"{one}-{other}-direct", one)
        for name in ("config.json", "model.safetensors"):
            assert (back / name).read_bytes() == (direct / name).read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_types_round_trip_through_all_dialects(dtype: str, tmp_path: Path):
    first = save(make_head(), tmp_path / "0", "official", dtype=dtype)
    folder = first
    for i, dialect in enumerate(("specforge", "speculators", "official"), 1):
        folder = save(load_head(folder, TARGET), tmp_path / str(i), dialect, dtype=dtype)
    assert (folder / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


def test_what_each_dialect_writes(tmp_path: Path):
    head = make_head(taps=(1, 3, 6), norm_output=True)
    plain = make_head(taps=(1, 3, 6))
    folders = {name: save(plain if name == "official" else head, tmp_path / name, name) for name in DIALECTS}
    raw = {name: json.loads((folder / "config.json").read_text()) for name, folder in folders.items()}
    assert raw["official"]["architectures"] == raw["specforge"]["architectures"] == ["LlamaForCausalLMEagle3"]
    # vLLM reads the top level as entering-block ids, SGLang reads `eagle_config` as output-of-block ids.
    for name in ("official", "specforge"):
        assert raw[name][TAP_IDS] == [1, 3, 6]
        assert raw[name]["eagle_config"] == {TAP_IDS: [0, 2, 5], "use_aux_hidden_state": True}
    assert raw["specforge"]["norm_output"] is True
    theirs = raw["speculators"]
    assert theirs["architectures"] == ["Eagle3Speculator"]
    assert theirs["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert theirs["speculators_config"]["proposal_methods"][0]["proposal_type"] == "greedy"
    assert (theirs[TAP_IDS], theirs["norm_before_residual"], theirs["norm_output"]) == ([1, 3, 6], False, True)
    assert {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 10}.items() <= theirs["transformer_layer_config"].items()
    for layer in (raw["official"], raw["specforge"], theirs["transformer_layer_config"]):
        assert (layer["rope_theta"], layer["rope_parameters"]["rope_theta"]) == (5000.0, 5000.0)
    assert [detect(raw[name]) for name in DIALECTS] == list(DIALECTS)
    keys = {name: set(load_file(tmp_path / name / "model.safetensors")) for name in DIALECTS}
    assert keys["official"] == keys["specforge"] == {key.replace("layers.0.", "midlayer.") for key in keys["speculators"]}


@pytest.mark.parametrize(
    ("dialect", "changes", "message"),
    [
        *(("official", {flag: True}, rf"official dialect cannot carry {flag}") for flag in LATER),
        ("official", {"taps": (2, 4)}, "2 taps"),
        *((dialect, {"taps": (2, 4, 8)}, "tap 8, the final normed state") for dialect in ("official", "speculators")),
        ("specforge", {"taps": (0, 4, 5)}, r"specforge dialect cannot carry tap 0"),
        *((dialect, {"taps": (4, 2, 5)}, r"taps \(4, 2, 5\) \(vLLM and SGLang") for dialect in DIALECTS),
        ("speculators", {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc together with fc_norm"),
    ],
)
def test_what_a_dialect_cannot_carry_is_refused(dialect: str, changes: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(WeightsError, match=message):
        save(make_head(**changes), tmp_path / "head", dialect)
    with pytest.raises(WeightsError, match="stores its target's name"):
        save_head(make_head(), tmp_path / "head", dialect="speculators")
    with pytest.raises(WeightsError, match=r"'other' is unknown \(known: official, specforge, speculators\)"):
        save(make_head(), tmp_path / "head", "other")
    assert list(tmp_path.iterdir()) == []


def test_the_dialect_that_suits_a_head():
    chosen = {"official": {}, "specforge": {"norm_output": True}, "speculators": {"taps": (0, 3)}}
    assert all(suited(make_head(**changes).config).name == name for name, changes in chosen.items())
    with pytest.raises(WeightsError, match=r"official not taps .*; specforge not taps .*; speculators not taps"):
        suited(make_head(taps=(4, 2, 5)).config)


def test_the_final_state_is_named_only_where_no_other_reader_looks(tmp_path: Path):
    head = make_head(taps=(8,))
    folder = save(head, tmp_path / "head", "specforge")
    assert not {TAP_IDS, "eagle_config"} & json.loads((folder / "config.json").read_text()).keys()
    assert_same(load_head(folder, TARGET), head)


# --- read as others write ---


def test_the_dialect_is_told_by_content_and_can_be_overruled(tmp_path: Path):
    folder = save(make_head(norm_before_residual=True), tmp_path / "EAGLE3-official", "speculators")
    assert load_draft(folder, TARGET).config.norm_before_residual
    edit(folder, config={"norm_before_residual": None})
    assert load_head(folder, TARGET).config.norm_before_residual, "absent means True in this dialect, as vLLM reads it"
    for wrong in ("official", "specforge"):
        with pytest.raises(ConfigError, match="num_attention_heads"):
            load_head(folder, TARGET, dialect=wrong)
    plain = save(make_head(), tmp_path / "speculators", "official")
    with pytest.raises(ConfigError, match="speculators_model_type None"):
        load_draft(plain, TARGET, dialect="speculators")
    edit(folder, config={"speculators_model_type": "peagle"})
    with pytest.raises(ConfigError, match="'peagle' is not supported"):
        load_head(folder, TARGET)
    edit(folder, config={"speculators_model_type": "eagle3", "transformer_layer_config": [1]})
    with pytest.raises(ConfigError, match="transformer_layer_config must be an object"):
        load_head(folder, TARGET)


def test_names_of_older_files(tmp_path: Path):
    """`aux_norm_*` with `use_aux_norm`, or without a word in the config; a layer that is named as vLLM names it."""
    head = make_head(fc_norm=True)
    folder = save(head, tmp_path / "head", "specforge")
    tensors = load_file(folder / "model.safetensors")
    older = {f"fc_norm.{i}.weight": f"aux_norm_{name}.weight" for i, name in enumerate(("low", "mid", "high"))}
    save_file({older.get(k, k).replace("midlayer.", "layers.0."): v for k, v in tensors.items()}, folder / "model.safetensors")
    for changes in ({"fc_norm": None, "use_aux_norm": True}, {"use_aux_norm": None}):
        edit(folder, config=changes)
        assert_same(load_head(folder, TARGET), head)
    edit(folder, config={"fc_norm": False})
    with pytest.raises(ConfigError, match="fc_norm is false, but the file holds its tensors"):
        load_head(folder, TARGET)
    edit(folder, {"fc_norm.1.weight": np.ones(8, np.float32)}, config={"fc_norm": True})
    with pytest.raises(WeightsError, match=r"'aux_norm_mid\.weight' and 'fc_norm\.1\.weight' are the same weight"):
        load_head(folder, TARGET)


@pytest.mark.parametrize("key", ["fc_norm.2.weight", "input_norm.weight", "embed_tokens.weight"])
def test_the_tensors_of_a_variant_are_required(key: str, tmp_path: Path):
    folder = save(make_head(fc_norm=True, norm_before_fc=True, **NARROW), tmp_path / "head", "specforge")
    edit(folder, without=(key,))
    with pytest.raises((WeightsError, ConfigError), match=rf"{key}"):
        load_head(folder, TARGET)


def test_an_embedding_is_kept_only_where_it_differs_from_the_targets(tmp_path: Path):
    random = np.random.default_rng(3)
    target = Target(TARGET)
    values = {n: jnp.asarray(random.normal(size=v.get_value().shape).astype(jnp.bfloat16)) for n, v in named_variables(target)}
    target = fill(target, {n: v.astype(jnp.float32) for n, v in values.items()})
    head = make_head(own_embedding=True)
    folder = save(head, tmp_path / "own", "speculators")
    assert_same(load_head(folder, target), head)
    same = fill(head, {n: v.get_value() for n, v in named_variables(head)} | {"embed": target.embed[...]})
    folder = save(same, tmp_path / "same", "speculators", dtype="bfloat16")
    assert load_head(folder, target).config == make_head().config
    assert load_head(folder, TARGET).config.own_embedding, "nothing to compare with"
    beside = save(make_head(), tmp_path / "beside", "speculators", embedding=target.embed[...])
    assert load_file(beside / "model.safetensors")["embed_tokens.weight"].shape == (10, 8)
    assert_same(load_head(beside, target), make_head())
    with pytest.raises(WeightsError, match=r"embedding: \(4, 8\), expected \(10, 8\)"):
        save(make_head(), tmp_path / "wrong", "speculators", embedding=target.embed[...][:4])


@pytest.mark.parametrize(
    ("stored", "options", "taps"),
    [
        ({TAP_IDS: [1, 3, 6], "eagle_config": {TAP_IDS: [0, 2, 5]}}, {}, (1, 3, 6)),  # each reader its own
        ({"eagle_config": {TAP_IDS: [0, 2, 5]}}, {"tap_convention": "output"}, (1, 3, 6)),
        ({"eagle_config": {TAP_IDS: [0, 2, 5]}}, {"tap_convention": "entering"}, (0, 2, 5)),
        ({"eagle_config": {TAP_IDS: [0, 2, 5]}}, {"taps": (1, 3, 6)}, (1, 3, 6)),
        ({"eagle_config": {TAP_IDS: [1, 3, 4]}}, {}, (2, 4, 5)),  # the default of the other convention
        ({"eagle_config": {TAP_IDS: [0, 2, 5]}}, {}, None),
        ({TAP_IDS: [0, 2, 5], "eagle_config": {TAP_IDS: [2, 4, 5]}}, {"tap_convention": "entering"}, None),
        ({TAP_IDS: [0, 2, 5]}, {"tap_convention": "in"}, None),
        ({TAP_IDS: ["2", 4, 5]}, {}, None),
    ],
)
def test_the_convention_of_taps_is_explicit(stored: dict[str, Any], options: dict[str, Any], taps: tuple[int, ...] | None, tmp_path: Path):
    folder = save(make_head(), tmp_path / "head", "specforge")
    edit(folder, config={"eagle_taps": None, TAP_IDS: None, "eagle_config": None, **stored})
    if taps is None:
        with pytest.raises(ConfigError, match=r"name the taps|contradict each other|'in' is unknown|list of block ids"):
            load_head(folder, TARGET, **options)
    else:
        assert load_draft(folder, TARGET, **options).config.taps == taps


def test_speculators_ids_are_entering_ids(tmp_path: Path):
    """No default and no `eagle_taps` is needed to settle them."""
    folder = save(make_head(taps=(1, 3, 6)), tmp_path / "head", "speculators")
    assert "eagle_taps" not in json.loads((folder / "config.json").read_text())
    assert load_head(folder, TARGET).config.taps == (1, 3, 6)
    assert load_head(folder, TARGET, tap_convention="output").config.taps == (2, 4, 7)
    with pytest.raises(ConfigError, match=r"made with taps \(1, 3, 6\), asked for \(2, 4, 5\)"):
        load_head(folder, TARGET, taps=(2, 4, 5))
    edit(folder, config={TAP_IDS: [1, 3, 8]})
    with pytest.raises(ConfigError, match="before the final norm is not supported"):
        load_head(folder, TARGET)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_rotary_base_travels_and_can_be_overruled(dialect: str, tmp_path: Path):
    scaled = RopeConfig(theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
    folder = save(make_head(rope=scaled), tmp_path / "head", dialect)
    assert load_head(folder, TARGET).config.rope == scaled
    assert load_draft(folder, TARGET, rope_theta=10000.0).config.rope == RopeConfig(theta=10000.0)


# --- damaged files ---


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_deleted_key_and_every_flipped_map_is_named(dialect: str, tmp_path: Path):
    folder = save(make_head(), tmp_path / "head", dialect)
    whole = load_file(folder / "model.safetensors")
    for key in whole:
        save_file({k: v for k, v in whole.items() if k != key}, folder / "model.safetensors")
        with pytest.raises(WeightsError, match=rf"'{key}' is missing"):
            load_head(folder, TARGET)
    for change, message in (
        ({"d2t": np.array(KEPT)}, "outside the vocabulary"),  # ids instead of offsets
        ({"d2t": whole["d2t"].astype(np.float32)}, "'d2t' is float32"),
        ({"extra.weight": whole["norm.weight"]}, "'extra.weight' is not part"),
        ({"fc.weight": whole["fc.weight"].astype(np.int32)}, "dtype int32, expected a floating-point type"),
        ({"lm_head.weight": whole["lm_head.weight"] * np.nan}, "'lm_head.weight' holds values that are not finite"),
    ):
        save_file(whole | change, folder / "model.safetensors")
        with pytest.raises(WeightsError, match=message):
            load_head(folder, TARGET)


def test_every_damaged_byte_of_the_header_is_an_error_or_harmless(tmp_path: Path):
    """Any flip gives a named error or the same head: never another one, never another kind of exception."""
    head = make_head()
    folder = save(head, tmp_path / "head", "official")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    random = np.random.default_rng(0)
    places = [*range(8), *random.integers(8, 8 + size, 120).tolist()]
    refused = 0
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << int(random.integers(7)))]) + whole[place + 1 :])
        try:
            again = load_head(folder, TARGET)
        except WeightsError as error:
            refused += str(folder) in str(error)
        else:
            assert_same(again, head)
    assert refused > len(places) * 0.9
    for length in (0, 4, 8, 8 + size // 2, 8 + size, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"model\.safetensors"):
            load_head(folder, TARGET)


def test_a_tensor_or_key_that_is_there_twice_is_named(tmp_path: Path):
    folder = save(make_head(), tmp_path / "head", "official")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    again = whole[8 : 8 + size].rstrip()[:-1] + b',"fc.weight":' + json.dumps(header["fc.weight"]).encode() + b"}"
    path.write_bytes(len(again).to_bytes(8, "little") + again + whole[8 + size :])
    with pytest.raises(WeightsError, match=r"'fc\.weight' is there twice"):
        load_head(folder, TARGET)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.rstrip()[:-1] + ', "vocab_size": 12}')
    with pytest.raises(ConfigError, match="'vocab_size' is there twice"):
        load_head(folder, TARGET)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", 3, "a\\b"])
def test_an_index_cannot_leave_its_folder(name: Any, tmp_path: Path):
    folder = save(make_head(), tmp_path / "head", "official")
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    keys = dict.fromkeys(load_file(tmp_path / "secret.safetensors"), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": keys}))
    with pytest.raises(WeightsError, match="is not the name of a file in the same folder"):
        load_head(folder, TARGET)


def test_shards_with_an_index(tmp_path: Path):
    head = make_head()
    folder = save(head, tmp_path / "head", "speculators")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(tensors)}
    for name in set(names.values()):
        save_file({key: tensors[key] for key in tensors if names[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert_same(load_head(folder, TARGET), head)


def test_a_head_for_another_target_is_refused_in_every_dialect(tmp_path: Path):
    for dialect in DIALECTS:
        folder = save(make_head(**NARROW), tmp_path / dialect, dialect)
        for changes, message in (({"hidden_size": 6}, "hidden size is 8; the given target's is 6"), ({"num_layers": 9}, "is 8; .* is 9")):
            with pytest.raises(ConfigError, match=message):
                load_draft(folder, dataclasses.replace(TARGET, **changes))
