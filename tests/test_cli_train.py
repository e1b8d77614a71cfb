"""eagle3-train from the command line: conversations in, a head out, stopped and resumed, and every mistake on one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_scripts import load_script, run_script, save_word_tokenizer

from eagle3_jax.config import DraftConfig
from eagle3_jax.decoding.generate import generate
from eagle3_jax.training.train import FLATTENING, fresh_draft, frozen_tables, start_from_target
from eagle3_jax.tree import Chain
from eagle3_jax.weights import load_draft, load_target

SCRIPT = load_script("train", "train")
# Every turn is closed by the word that the tiny target has as its stop id.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' system ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
SMALL = ("--draft-vocab", "48", "--hold-out", "4", "--max-tokens", "32", "--rows", "2", "--row-tokens", "64", "--row-slots", "48")
STEPS = ("--steps", "4", "--warmup", "1", "--lr-decay", "1", "--ttt-steps", "2", "--checkpoint-every", "2", "--evaluate-every", "3")


@pytest.fixture(scope="module")
def target(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("target")
    shutil.copytree(golden / "target", folder, dirs_exist_ok=True)
    save_word_tokenizer(folder, TEMPLATE)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": "system"}))
    return folder


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen questions and answers of the tokenizer's words."""
    random = np.random.default_rng(0)
    words = lambda: " ".join(f"w{i}" for i in random.integers(3, 60, 8))  # noqa: E731
    lines = [json.dumps({"messages": [{"role": "user", "content": words()}, {"role": "assistant", "content": words()}]}) for _ in range(16)]
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_run_stopped_and_resumed(target: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "run"
    arguments = ("--target", str(target), "--data", str(conversations), "--out", str(out), *SMALL)
    assert run_script(SCRIPT, *arguments, *STEPS, "--start", "target-head") == 0
    said = capsys.readouterr().out
    assert "16 kept" in said
    assert "48 of 160 tokens" in said
    assert f"head written to {out / 'head'}" in said
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4]
    assert [r["step"] for r in records if "held_out" in r] == [3, 4]

    model = load_target(target)
    card = (out / "head" / "README.md").read_text()
    assert "`aligned`" in card and "conversations of" in card and "not recorded" not in card
    head = load_draft(out / "head", model)
    assert np.abs(np.asarray(head.fc[...])).max() > 0
    prompt = [[3, 4, 5]]
    spoken = generate(model, head, prompt, 8, tree=Chain(2), eos_token_ids=[])
    assert spoken.tokens == generate(model, None, prompt, 8, eos_token_ids=[]).tokens

    assert run_script(SCRIPT, *arguments, *STEPS) == 2
    assert "--resume" in capsys.readouterr().err
    assert run_script(SCRIPT, *arguments, *STEPS, "--resume") == 2
    assert "start: checkpoint 'target-head', asked for 'random'" in capsys.readouterr().err
    assert run_script(SCRIPT, *arguments, *STEPS, "--start", "target-head", "--resume") == 0
    assert "resumed at step 4" in capsys.readouterr().out


@pytest.mark.slow
def test_the_target_within_the_step_and_the_decoder_as_judge(
    target: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "run"
    arguments = (
        "--target",
        str(target),
        "--data",
        str(conversations),
        "--out",
        str(out),
        *SMALL,
        *STEPS,
        "--online",
        "--loss",
        "lk_lambda",
    )
    decoding = ("--decode-every", "2", "--decode-prompts", "2", "--decode-tokens", "6", "--decode-tree", "chain:2")
    assert run_script(SCRIPT, *arguments, *decoding, "--schedule", "linear") == 0
    said = capsys.readouterr().out
    assert "the target runs within each step" in said
    assert not (out / "features").exists()
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    lengths = {r["step"]: r["decoded"]["acceptance_length"] for r in records if "decoded" in r}
    assert sorted(lengths) == [2, 4]
    steps = [r for r in records if "loss" in r]
    assert all(r["utilization"] > 0 and r["gradient_norm"] > 0 and r["learning_rate"] > 0 for r in steps)
    best = max(lengths, key=lambda step: (lengths[step], step))
    assert (f"the draft of step {best} has the best acceptance length" in said) == (best != 4)
    # The result is the head that was judged the best: decoding with it gives that figure again.
    model = load_target(target)
    head = load_draft(out / "head", model)
    assert head.config.draft_vocab_size == 48
    assert (out / "checkpoints" / str(best)).is_dir()
    assert run_script(SCRIPT, *arguments, *decoding, "--schedule", "cosine", "--resume") == 2
    assert "train.schedule: checkpoint 'linear', asked for 'cosine'" in capsys.readouterr().err


def test_a_cpu_decodes_in_float32_whatever_it_trains_in(
    target: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def noted(model, draft, *args, **options):
        seen.append((model.dtype.name, draft.dtype.name))
        return generate(model, draft, *args, **options)

    monkeypatch.setattr("eagle3_jax.training.train.generate", noted)
    arguments = ("--target", str(target), "--data", str(conversations), "--out", str(tmp_path / "run"), *SMALL, *STEPS)
    decoding = ("--decode-every", "2", "--decode-prompts", "2", "--decode-tokens", "6", "--decode-tree", "chain:2")
    assert run_script(SCRIPT, *arguments, *decoding, "--compute-dtype", "bfloat16") == 0
    assert seen == [("float32", "float32")] * 2


def test_a_start_from_the_targets_head(target: Path) -> None:
    model = load_target(target)
    kept = np.arange(0, 160, 4, dtype=np.int32)
    draft, frozen = fresh_draft(DraftConfig.for_target(model.config, len(kept)), kept, 0), frozen_tables(model, kept)
    start_from_target(draft, model, frozen)
    np.testing.assert_array_equal(draft.head[...], model.head[...][:, kept])
    np.testing.assert_array_equal(draft.norm[...], FLATTENING * model.norm[...])


@pytest.mark.slow
def test_a_head_that_is_not_trained_is_the_targets(target: Path, conversations: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("--target", str(target), "--data", str(conversations), "--out", str(out), *SMALL)
    assert run_script(SCRIPT, *arguments, "--recipe", "speculators", "--steps", "2", "--warmup", "1") == 0
    model = load_target(target)
    head = load_draft(out / "head", model)
    np.testing.assert_allclose(head.head[...], np.asarray(model.head[...])[:, np.asarray(head.d2t[...])], rtol=2**-7)


@pytest.mark.slow
def test_a_head_trained_further(target: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    common, rest = ("--target", str(target), "--data", str(conversations)), [*SMALL[2:], *STEPS]
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_script(SCRIPT, *common, "--out", str(first), "--draft-vocab", "48", *rest) == 0
    assert run_script(SCRIPT, *common, "--out", str(second), "--start", str(first / "head"), *rest, "--peak-lr", "1e-12") == 0
    said = capsys.readouterr().out
    assert f"draft vocabulary of {first / 'head'}" in said
    model = load_target(target)
    once, twice = (load_draft(out / "head", model, layout="plain") for out in (first, second))
    # At a rate far below a bfloat16 step it comes out as it went in.
    for name in ("fc", "q", "head", "norm", "d2t"):
        np.testing.assert_array_equal(getattr(twice, name)[...], getattr(once, name)[...])
    moved = tmp_path / "moved"
    further = ("--out", str(moved), "--start", str(first / "head"), "--features-from", str(first))
    assert run_script(SCRIPT, *common, *further, *rest, "--peak-lr", "1e-2") == 0
    assert "12 examples' features are taken over" in capsys.readouterr().out
    assert np.abs(load_draft(moved / "head", model, layout="plain").fc[...] - once.fc[...]).max() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--hold-out", "16"), "no more than the 16 held out"),
        (("--row-slots", "65"), "row_slots 65 exceeds row_tokens 64"),
        (("--recipe", "specfrog"), "specfrog"),
        (("--decode-every", "2", "--hold-out", "0"), "hold_out is 0"),
        (("--taps", "2", "1", "3"), "taps (2, 1, 3) (vLLM and SGLang hand the states over in ascending order)"),
        (("--features-from", "nowhere"), "nowhere: no feature cache here"),
        (("--features-from", "nowhere", "--online"), "features_from: an online run reads no features"),
        (("--start", "some/head"), "start some/head: an existing head brings its draft vocabulary and taps along"),
    ],
)
def test_mistakes(changes, message, target: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "run"
    arguments = ("--target", str(target), "--data", str(conversations), "--out", str(out), *SMALL, *STEPS, *changes)
    assert run_script(SCRIPT, *arguments) != 0
    assert message in capsys.readouterr().err
    assert not (out / "head").exists()
