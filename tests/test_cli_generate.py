"""eagle3-generate on the tiny pair: answers, comparison, trees, JSON, and every mistake on one line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_scripts import ROOT, load_script, run_script, save_word_tokenizer

from eagle3_jax.bench.benchmark import Programs
from eagle3_jax.decoding.generate import generate
from eagle3_jax.tree import Chain

IDS = [3, 14, 15]
SCRIPT = load_script("generate")
SHORT = ("--max-new-tokens", "16", "--ignore-eos", "--tree", "chain:2")


@pytest.fixture(scope="module")
def models(golden: Path) -> tuple[str, ...]:
    return ("--target", str(golden / "target"), "--draft", str(golden / "head"))


@pytest.fixture(autouse=True)
def _shared_programs(shared_programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCRIPT, "Programs", lambda target, draft: shared_programs)


@pytest.fixture(scope="module")
def shared_programs(golden_target, golden_draft) -> Programs:
    """One set of compiled programs for all tests: every run of the command loads the same weights."""
    return Programs(golden_target, golden_draft)


@pytest.fixture(scope="module")
def expected(golden_target, golden_draft) -> list[int]:
    return generate(golden_target, golden_draft, [IDS], 16, tree=Chain(2), eos_token_ids=[]).tokens[0]


def test_prompt_ids(models, expected, capsys: pytest.CaptureFixture) -> None:
    assert run_script(SCRIPT, *models, *SHORT, "--prompt-ids", "3,14,15") == 0
    out, err = capsys.readouterr()
    assert out == " ".join(map(str, expected)) + "\n"
    assert err.startswith("[chain:2: 16 tokens in ")
    assert "acceptance length " in err
    assert "ended at the limit" in err
    assert run_script(SCRIPT, *models, *SHORT, "--prompt-ids", "3 14 15", "--quiet") == 0
    assert capsys.readouterr() == (out, "")


def test_json_and_stop(models, expected, capsys: pytest.CaptureFixture) -> None:
    stop = expected[4]
    count = expected.index(stop) + 1
    assert run_script(SCRIPT, *models, *SHORT, "--prompt-ids", "3,14,15", "--stop", str(stop), "--json", "--quiet") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tokens"] == expected[:count]
    assert record["finish_reason"] == "stop"
    assert record["tree"] == "chain:2"
    assert sum(record["accept_lengths"]) == count - 1
    assert record["prompt_tokens"] == 3


def test_text_prompts_go_through_the_chat_template(models, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    save_word_tokenizer(tmp_path)
    common = (*models, *SHORT, "--tokenizer", str(tmp_path), "--json", "--quiet")
    asked = {}
    for name, argv in {
        "chat": ["w5 w6"],
        "stdin": ["-"],
        "system": ["w5 w6", "--system", "w9"],
        "plain": ["w5 w6", "--no-chat-template"],
    }.items():
        monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6"))
        assert run_script(SCRIPT, *common, *argv) == 0
        asked[name] = json.loads(capsys.readouterr().out)
    assert [asked[name]["prompt_tokens"] for name in ("chat", "stdin", "system", "plain")] == [4, 4, 6, 2]
    assert asked["chat"]["tokens"] == asked["stdin"]["tokens"]
    words = asked["chat"]["text"].split()
    assert [0 if word == "user" else 1 if word == "assistant" else 2 if word == "system" else int(word[1:]) for word in words] == asked[
        "chat"
    ]["tokens"]
    assert run_script(SCRIPT, *common, "--prompt-ids", "0,5,6,1") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == asked["chat"]["tokens"]


def test_a_file_of_prompts_in_batches(models, tmp_path: Path, golden_target, golden_draft, capsys: pytest.CaptureFixture) -> None:
    rows = [IDS, [9, 2, 6, 5], [7]]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": f"q{i}", "prompt_ids": row}) + "\n" for i, row in enumerate(rows)), encoding="utf-8")
    argv = (*models, *SHORT, "--file", str(file), "--temperature", "0.9", "--seed", "4", "--quiet")
    wanted = generate(golden_target, golden_draft, rows, 16, temperature=0.9, seed=4, tree=Chain(2), eos_token_ids=[]).tokens
    assert run_script(SCRIPT, *argv) == 0
    text = capsys.readouterr().out
    assert text == "".join(f"--- q{i}\n{' '.join(map(str, tokens))}\n" for i, tokens in enumerate(wanted))
    assert run_script(SCRIPT, *argv, "--batch", "3", "--json") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["tokens"] for record in records] == wanted
    assert [record["prompt"] for record in records] == ["q0", "q1", "q2"]
    assert run_script(SCRIPT, *argv, "--limit", "1") == 0
    assert "q1" not in capsys.readouterr().out


def test_compare(models, expected, capsys: pytest.CaptureFixture) -> None:
    argv = (*models, *SHORT, "--prompt-ids", "3,14,15", "--compare")
    assert run_script(SCRIPT, *argv) == 0
    out = capsys.readouterr().out
    text = " ".join(map(str, expected))
    assert out.startswith(f"plain:\n{text}\n\nspeculative (chain:2):\n{text}\n\n")
    assert "\nsame text: yes, all 16 tokens\n" in out
    assert out.endswith(" times as fast as plain decoding\n")
    assert "\x1b" not in out
    assert run_script(SCRIPT, *argv, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["answers"] == [{"prompt": "prompt", "plain": text, "speculative": text, "same_tokens": True}]
    assert [mode["mode"] for mode in result["modes"]] == ["plain", "chain:2"]
    assert len(result["samples"][0]["seconds"]) == 2


def test_compare_on_a_terminal_is_side_by_side(models, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "61")
    assert run_script(SCRIPT, *models, *SHORT, "--prompt-ids", "3,14,15", "--compare") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("│")[1] == " speculative (chain:2)"
    assert lines[1] == "─" * 30 + "┼" + "─" * 30
    left, right = lines[2].split("│")
    assert left.strip() == right.strip() != ""


def test_texts_that_differ_are_not_called_the_same() -> None:
    from eagle3_jax.prompts import Prompt

    said = SCRIPT.verdict([(Prompt("a"), [1, 2], [1, 2]), (Prompt("b"), [1, 2, 3], [1, 5, 3]), (Prompt("c"), [1], [1, 2])])
    assert said.startswith("same text: no, 2 of 3 answers differ; b from token 2 on.")


def test_show_tree(models, expected, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run_script(SCRIPT, *models, *SHORT, "--prompt-ids", "3,14,15", "--quiet", "--show-cycles", "2", "--show-tree") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == " ".join(map(str, expected))
    assert out.count("cycle ") == 2
    assert f'● "{expected[0]}"' in out
    pytest.importorskip("matplotlib")
    path = tmp_path / "tree.PNG"
    assert run_script(SCRIPT, *models, *SHORT, "--prompt-ids", "3,14,15", "--show-tree", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"trees drawn in {path}" in capsys.readouterr().err


def test_a_prompt_after_show_tree_is_a_prompt() -> None:
    args = SCRIPT.parse(["--show-tree", "Why is the sky blue?"])
    assert (args.prompt, args.show_tree) == ("Why is the sky blue?", "")
    args = SCRIPT.parse(["--show-tree", "a.png", "Why?"])
    assert (args.prompt, args.show_tree) == ("Why?", "a.png")
    args = SCRIPT.parse(["Why?", "--show-tree"])
    assert (args.prompt, args.show_tree) == ("Why?", "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tree", "bush:3", "x"], "tree 'bush:3' is not understood"),
        (["--tree", "tree:60,2,2", "x"], "at most"),
        (["--file", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["  "], "prompt is empty"),
        (["-"], "stdin is empty"),
        (["x", "--prompt-ids", "1"], "give one of"),
        (["--prompt-ids", "1,x"], "expected whole numbers"),
        (["--prompt-ids", ","], "--prompt-ids is empty"),
        (["--prompt-ids", "1,160"], "id 160 is outside the target's vocabulary of 160"),
        (["--prompt-ids", ",".join(["1"] * 3000)], "no room for an answer"),
        (["--prompt-ids", "1", "--temperature", "-1"], "--temperature: '-1' must be a finite number"),
        (["--prompt-ids", "1", "--top-p", "0"], "top_p: 0.0"),
        (["--prompt-ids", "1", "--max-new-tokens", "-4"], "max_new_tokens: -4"),
        (["--prompt-ids", "1", "--stop", "word"], "--stop 'word': the target has no tokenizer"),
        (["--prompt-ids", "1", "--stop", "999"], "eos_token_ids: id 999"),
        (["--prompt-ids", "1", "--rule", "rejection", "--tree", "tree:8,2,3"], "only for chains"),
        (["--prompt-ids", "1", "--draft", "none", "--compare"], "--compare needs a draft"),
        (["--prompt-ids", "1", "--draft", "none", "--show-tree"], "--show-tree needs a draft"),
        (["--prompt-ids", "1", "--show-tree", "nowhere/tree.png"], "no folder nowhere"),
        (["--prompt-ids", "1", "--show-tree", "tree.jpg"], "ends in .png"),
        (["--prompt-ids", "1", "--batch", "0"], "must be a whole number >= 1"),
        (["--prompt-ids", "1", "--draft", "nowhere"], "nowhere: no such file or folder"),
        (["x"], "no tokenizer"),
    ],
)
def test_mistakes_take_one_line(models, argv: list[str], words: str, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run_script(SCRIPT, *models, *argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("eagle3-generate: ")
    assert err.count("\n") == 1


def test_mistakes_in_the_target(tmp_path: Path, golden: Path, capsys: pytest.CaptureFixture) -> None:
    for target, draft, words in (
        (str(tmp_path / "gone"), "none", "gone: no such file or folder"),
        (str(tmp_path), "none", "config.json: no such file"),
        (str(golden / "target"), None, "no built-in head"),
        (str(golden / "extra_headdim_target"), str(golden / "head"), "for a target whose"),
    ):
        named = () if draft is None else ("--draft", draft)
        assert run_script(SCRIPT, "--target", target, *named, "--prompt-ids", "1,2") == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1


def test_stop_texts(models, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_word_tokenizer(tmp_path)
    argv = (*models, *SHORT, "--tokenizer", str(tmp_path), "--prompt-ids", "3,14,15", "--quiet", "--json")
    assert run_script(SCRIPT, *argv, "--stop", "w85") == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert tokens.index(85) == len(tokens) - 1
    assert run_script(SCRIPT, *argv, "--stop", "w8 w9") == 2
    assert 'is 2 tokens ("w8", "w9")' in capsys.readouterr().err


def test_no_prompt_at_a_terminal(models, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert run_script(SCRIPT, *models) == 2
    assert "no prompt: write eagle3-generate" in capsys.readouterr().err


def test_help_names_defaults_and_examples(capsys: pytest.CaptureFixture) -> None:
    assert run_script(SCRIPT, "--help") == 0
    out = capsys.readouterr().out
    assert "(default: 256)" in out
    assert 'eagle3-generate "Why is the sky blue?" --compare' in out
    assert "(default: None)" not in out
    assert "(default: False)" not in out


@pytest.mark.slow
def test_the_second_process_compiles_nothing(models, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "infer" / "generate.py"), *models, *SHORT, "--prompt-ids", "3,14,15", "--json", "--quiet"]
    runs = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        runs.append((json.loads(done.stdout), sorted(tmp_path.rglob("jit_run-*-cache"))))
    (first, kept), (second, kept_then) = runs
    assert first["tokens"] == second["tokens"]
    assert len(kept) == 1
    assert kept == kept_then
    done = subprocess.run([*command, "--no-compilation-cache"], env={**environment, "XDG_CACHE_HOME": str(tmp_path / "other")}, check=True)
    # The custom calls of a CPU are no program of XLA's, and are kept all the same.
    assert {path.name for path in (tmp_path / "other").glob("eagle3_jax/*")} <= {"native"}
