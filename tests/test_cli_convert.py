"""eagle3-convert: reports that say what is odd, heads and targets carried over, readings that are wrong found out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from command_scripts import load_script, save_word_tokenizer
from safetensors.numpy import load_file
from test_weights_heads import TARGET, edit, make_head
from tiny_checkpoints import config_of, tensors_of, write_folder

from eagle3_jax import diagnose as diagnosis
from eagle3_jax.commands import run_command
from eagle3_jax.config import TAP_IDS, RopeConfig
from eagle3_jax.diagnose import Reading, judge, neighbours
from eagle3_jax.weights import load_head, load_target, save_head
from eagle3_jax.weights.dialects import DIALECTS
from eagle3_jax.weights.model_card import model_card

SCRIPT = load_script("convert")


def run(*argv: str | Path) -> int:
    try:
        return run_command(SCRIPT.PROG, SCRIPT.main, SCRIPT.parse([str(part) for part in argv]))
    except SystemExit as done:
        return int(done.code or 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_head(make_head(), tmp_path / "head", dtype="float16")


# --- head ---


@pytest.mark.parametrize("to", DIALECTS)
def test_a_head_is_carried_over_with_its_card(to: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A head\nAccepts 2.5 on MT-bench.\n")
    (folder / "survival.json").write_text("counted")
    out = tmp_path / "out"
    assert run("head", folder, out, "--to", to, "--target-name", "owner/target", "--data", "My chats.", "--json") == 0
    assert (out / "survival.json").read_text() == "counted"
    done = json.loads(capsys.readouterr().out)
    assert (done["from"], done["to"], done["dtype"], done["taps"]) == ("official", to, "float16", [2, 4, 5])
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    renamed = {key.replace("midlayer.", DIALECTS[to].layer): array for key, array in before.items()}
    assert after.keys() == renamed.keys()
    assert all(after[key].tobytes() == renamed[key].tobytes() for key in after)
    assert load_head(out, TARGET).config == make_head().config
    card = (out / "README.md").read_text()
    for words in (
        "base_model: owner/target",
        "My chats.",
        "Recipe: not recorded.",
        "### A head",
        "Accepts 2.5",
        "vllm serve owner/target",
        to,
    ):
        assert words in card
    assert card.count("license: mit") == 0
    assert ("sglang.launch_server" in card) == (to != "speculators")
    assert run("head", folder, out, "--to", to, "--target-name", "owner/target") == 2
    assert "overwrite" in capsys.readouterr().err
    assert run("head", folder, out, "--to", to, "--target-name", "owner/target", "--overwrite") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "out"]


def test_corrections_are_written_down(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    out, options = tmp_path / "out", ["--to", "specforge", "--rope-theta", "10000", "--norm-before-residual", "true"]
    assert run("head", folder, out, *options, "--taps", "1", "3", "4") == 2
    assert "made with taps (2, 4, 5), asked for (1, 3, 4)" in capsys.readouterr().err
    assert not out.exists()
    assert run("head", folder, out, *options, "--taps", "1", "3", "4", "--overrule", "--dtype", "float32") == 0
    config = load_head(out, TARGET).config
    assert (config.taps, config.rope, config.norm_before_residual) == ((1, 3, 4), RopeConfig(), True)
    assert run("head", out, tmp_path / "official") == 2
    assert "official dialect cannot carry norm_before_residual" in capsys.readouterr().err
    assert "SGLang: not this head. It ignores norm_before_residual" in (out / "README.md").read_text()


def test_a_head_that_names_neither_taps_nor_depth_needs_its_target(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    edit(folder, config=dict.fromkeys(("eagle_taps", TAP_IDS, "eagle_config", "target_num_hidden_layers")))
    assert run("head", folder, tmp_path / "out") == 2
    assert "name --target or --taps" in capsys.readouterr().err
    assert run("head", folder, tmp_path / "out", "--taps", "2", "4", "5") == 0
    assert load_head(tmp_path / "out", TARGET).config.taps == (2, 4, 5)


# --- inspect ---


def test_inspect_a_head(folder: Path, capsys: pytest.CaptureFixture):
    assert run("inspect", folder) == 0
    text = capsys.readouterr().out
    for words in ("an EAGLE-3 head", "official", "[2, 4, 5]", '"float16": 13', "vocabulary 10, 8 blocks", "It loads."):
        assert words in text
    for name in ("smollm2-135m", "some/where.gguf"):
        text = model_card(make_head().config, "official", target_name=name)
        assert f"eagle3-convert target {name} TARGET" in text
        assert "vllm serve TARGET " in text
        assert "--model-path TARGET " in text
    assert "odd:" not in text


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        (dict.fromkeys(("eagle_taps", TAP_IDS, "eagle_config")), {}, "no taps are stored"),
        ({"eagle_taps": None, TAP_IDS: None}, {}, "SGLang reads them as block outputs, vLLM as block inputs"),
        (dict.fromkeys(("rope_theta", "rope_parameters", "rope_scaling")), {}, "10000 is assumed"),
        ({"target_hidden_size": 8}, {}, "would leave it random"),
        ({"tie_word_embeddings": True}, {}, "tie_word_embeddings is set"),
        ({"norm_before_residual": True}, {}, "SGLang ignores it without a word"),
        ({}, {"embed_tokens.weight": np.ones((10, 8), np.float16)}, "SGLang uses the target's in its place"),
        ({"eagle_taps": [5, 2, 4], TAP_IDS: None, "eagle_config": None}, {}, "taps (5, 2, 4) do not ascend"),
        ({}, {"fc.weight": np.zeros((8, 24), np.float16)}, "'fc.weight' is constant"),
        ({}, {"norm.weight": np.ones(8, np.float32)}, "stored in several types"),
        ({}, {"d2t": np.zeros(4, np.int64), "t2d": np.arange(10) < 4}, "most likely never filled"),
    ],
)
def test_inspect_says_what_is_odd(config: dict[str, Any], tensors: dict[str, Any], words: str, folder: Path, capsys: pytest.CaptureFixture):
    edit(folder, tensors, config=config)
    assert run("inspect", folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["error"] is None
    assert any(words in text for text in found["odd"]), found["odd"]


@pytest.mark.parametrize("stored", [{TAP_IDS: [2, 16, 29]}, {"eagle_config": {TAP_IDS: [1, 15, 28]}}])
def test_default_taps_settle_themselves_without_a_target(stored: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture):
    names = ("eagle_taps", TAP_IDS, "eagle_config", "target_num_hidden_layers")
    edit(folder, config=dict.fromkeys(names) | stored)
    assert run("inspect", folder, "--json") == 0
    assert json.loads(capsys.readouterr().out)["facts"]["taps (blocks whose input is read)"] == [2, 16, 29]


def test_inspect_a_broken_head(folder: Path, capsys: pytest.CaptureFixture):
    edit(folder, without=("midlayer.hidden_norm.weight",))
    assert run("inspect", folder) == 2
    captured = capsys.readouterr()
    assert "It does NOT load" in captured.out
    assert "'midlayer.hidden_norm.weight' is missing" in captured.err
    (folder / "model.safetensors").write_bytes(b"broken")
    assert run("inspect", folder) == 2
    assert "truncated" in capsys.readouterr().err
    assert run("inspect", folder / "config.json") == 2
    assert "expected a folder or a .gguf file" in capsys.readouterr().err


def test_inspect_against_a_target(golden: Path, folder: Path, capsys: pytest.CaptureFixture):
    assert run("inspect", golden / "head", "--target", golden / "target") == 0
    assert "8 blocks" in capsys.readouterr().out
    assert run("inspect", folder, "--target", golden / "target") == 2
    assert "whose hidden size is 8; the given target's is 64" in capsys.readouterr().err
    assert run("inspect", golden / "target") == 0
    text = capsys.readouterr().out
    assert "a target" in text and "default taps of a head  [2, 4, 5]" in text


# --- target ---


@pytest.mark.parametrize("case", ["biases_one_kv_head_tied", "llama3_two_kv_heads"])
def test_a_target_is_written_as_it_was_read(case: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    config = config_of(case)
    source = write_folder(tmp_path / "source", config, tensors_of(config))
    save_word_tokenizer(source)
    assert run("target", source, tmp_path / "out") == 0
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    assert load_target(tmp_path / "out").config == load_target(source).config
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert run("target", source, tmp_path / "out") == 2
    assert "is there already" in capsys.readouterr().err
    assert run("target", source, tmp_path / "out", "--overwrite", "--dtype", "bfloat16") == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype == jnp.bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


# --- verify ---


def reading(name: str, first: float, length: float, slots: int = 400, **changes: Any) -> Reading:
    rest = (length - 1 - first) / 2
    return Reading(**{**dict(name=name, taps=(2, 4, 5), rope_theta=1e4, norm_before_residual=False, slots=slots), **changes},
                   accuracy=(first, 0.3, 0.3), survival=(first, rest, rest))  # fmt: skip


def test_verdicts():
    lower, base = dict(name="taps one lower", taps=(1, 3, 4)), dict(name="rotary base", rope_theta=5e5)
    given = reading("as given", 0.30, 1.45)
    assert judge([given, reading(first=0.31, length=1.46, **lower)])[:2] == ("good", "as given")
    verdict, best, advice = judge([given, reading(first=0.45, length=1.8, **lower), reading(first=0.40, length=1.7, **base)])
    assert (verdict, best) == ("misread", "taps one lower")
    assert "--taps 1 3 4 --overrule" in advice
    assert "--rope-theta 500000" in judge([given, reading(first=0.42, length=1.7, **base)])[2]
    flipped = reading("norm_before_residual true", 0.42, 1.7, norm_before_residual=True)
    assert "--norm-before-residual true" in judge([given, flipped])[2]
    few = [reading("as given", 0.30, 1.45, slots=20), reading(first=0.45, length=1.8, slots=20, **lower)]
    assert judge(few)[0] == "good", "twenty positions prove nothing"
    assert judge([reading("as given", 0.02, 1.02), reading(first=0.03, length=1.03, **lower)])[0] == "dead"
    assert judge([reading("as given", 0.15, 1.2), reading(first=0.16, length=1.21, **lower)])[0] == "weak"


def test_what_is_tried(golden_draft):
    found = neighbours(golden_draft.config, RopeConfig(theta=10000.0))
    assert [config.taps for config in found.values()] == [(2, 4, 5), (1, 3, 4), (3, 5, 6), (2, 4, 5)]
    assert [config.norm_before_residual for config in found.values()] == [False, False, False, True]
    edge = make_head(taps=(0, 4, 7)).config
    tried = neighbours(edge, RopeConfig(theta=7.0))
    assert {config.taps for config in tried.values()} == {(0, 4, 7)}
    assert {config.rope.theta for config in tried.values()} == {5000.0, 10000.0, 7.0}


@pytest.mark.slow
def test_verify_finds_a_head_whose_taps_are_one_off(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """The tiny official head, as it is, and again saved with the ids that its taps are not."""
    save_word_tokenizer(tmp_path / "tokenizer")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [5 + i, 40, 9 + 2 * i, 77]}) + "\n" for i in range(6)))
    common = ["--target", golden / "target", "--tokenizer", tmp_path / "tokenizer", "--prompts", prompts, "--max-new-tokens", "48"]
    common += ["--no-compilation-cache", "--json"]
    assert run("verify", "--draft", golden / "head", *common) == 0
    right = json.loads(capsys.readouterr().out)
    given, *others = right["readings"]
    assert given["name"] == "as given"
    assert right["verdict"] in ("good", "weak")
    assert right["decoded"] > 1.05
    # The unroll counts what the decoder does: its first draft stands about as often as the table says.
    assert right["per_position"][0] == pytest.approx(given["accuracy"][0], abs=0.15)
    assert all(other["accuracy"][0] <= given["accuracy"][0] + 0.03 for other in others)
    assert run("head", golden / "head", tmp_path / "off", "--taps", "3", "5", "6", "--target", golden / "target") == 0
    capsys.readouterr()
    assert run("verify", "--draft", tmp_path / "off", *common) == 0
    wrong = json.loads(capsys.readouterr().out)
    assert [r["taps"] for r in wrong["readings"]][:2] == [[3, 5, 6], [2, 4, 5]]
    assert wrong["readings"][1]["accuracy"] == given["accuracy"]
    assert wrong["readings"][0]["accuracy"][0] < given["accuracy"][0]


def test_no_answer_to_score(golden_target, golden_draft):
    with pytest.raises(ValueError, match="no answer is long enough"):
        diagnosis.diagnose(golden_target, golden_draft, [[5, 6]], max_new_tokens=1, steps=3)


# --- the card ---


def test_a_card_says_what_is_known_and_what_is_not():
    plain = model_card(make_head().config, "official")
    for words in ("a target that is not recorded", "Data: not recorded.", "Not measured", 'e3.load_draft("HEAD", target)', "plain EAGLE-3"):
        assert words in plain
    assert "base_model" not in plain
    assert "base_model" not in model_card(make_head().config, "official", target_name="./here/folder")
    own = make_head(own_embedding=True, rope=RopeConfig(theta=5e5, kind="linear", factor=2.0))
    text = model_card(own.config, "specforge", acceptance=["2.1 tokens per cycle, chain of 3."], recipe="A recipe.")
    for words in ("2.1 tokens per cycle", "A recipe.", "the head's own", "500000, scaled", "SGLang puts the target's embedding"):
        assert words in text
    for name in ("smollm2-135m", "some/where.gguf"):
        text = model_card(make_head().config, "official", target_name=name)
        assert f"eagle3-convert target {name} TARGET" in text
        assert "vllm serve TARGET " in text
        assert "--model-path TARGET " in text
