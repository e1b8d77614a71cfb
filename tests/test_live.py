"""Answers shown as they come: whole characters, the same text in the end, a clean end whatever happens; eagle3-chat and --stream."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_scripts import ROOT, load_script, run_script, save_word_tokenizer
from hypothesis import given
from hypothesis import strategies as st

import eagle3_jax as e3
from eagle3_jax.compile_clock import CompileClock
from eagle3_jax.decoding import live
from eagle3_jax.decoding.live import BROKEN, TextPieces

GENERATE, CHAT = load_script("generate"), load_script("chat")
SHORT = ("--max-new-tokens", "16", "--ignore-eos", "--tree", "chain:2")
ASKED = [0, 5, 6, 1]  # "user w5 w6 assistant"


@pytest.fixture(scope="module")
def models(golden: Path) -> tuple[str, ...]:
    return ("--target", str(golden / "target"), "--draft", str(golden / "head"))


@pytest.fixture
def words(models, tmp_path: Path) -> tuple[str, ...]:
    save_word_tokenizer(tmp_path)
    return (*models, *SHORT, "--tokenizer", str(tmp_path))


def text_of(tokens: list[int]) -> str:
    return " ".join({0: "user", 1: "assistant", 2: "system"}.get(token, f"w{token}") for token in tokens)


def utf8(ids) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(max_size=8), st.data())
def test_pieces_hold_whole_characters(text: str, data) -> None:
    """However the bytes of a text are dealt out."""
    rest, pieces, shown = list(text.encode()), TextPieces(utf8), ""
    while rest:
        count = data.draw(st.integers(1, 3))
        piece = pieces.push(rest[:count])
        assert BROKEN not in piece or BROKEN in text
        shown, rest = shown + piece, rest[count:]
        assert text.startswith(shown)
    assert shown + pieces.finish() == text
    assert pieces.finish() == ""


@given(st.lists(st.integers(0, 255), max_size=12))
def test_pieces_of_any_bytes_are_the_whole(ids: list[int]) -> None:
    pieces = TextPieces(utf8)
    assert "".join(pieces.push([i]) for i in ids) + pieces.finish() == utf8(ids)


def test_the_clock_counts_nested_steps_once() -> None:
    clock = CompileClock()
    now = time.perf_counter()
    clock._heard("/jax/core/compile/inner", 0.2)
    clock._heard("/jax/core/compile/outer", 0.5)
    clock._heard("/jax/other", 9.0)
    assert clock.seconds == pytest.approx(0.5, abs=0.1 + time.perf_counter() - now)


def test_generate_streams(words, golden_target, golden_draft, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "prompt": "w5 w6"}\n{"id": "b", "prompt": "w9"}\n')
    argv = (*words, "--file", str(file), "--temperature", "0.8", "--seed", "3", "--stream", "--cycles", "2")
    assert run_script(GENERATE, *argv) == 0
    out, err = capsys.readouterr()
    options = {"temperature": 0.8, "seed": [3, 4], "tree": e3.Chain(2), "eos_token_ids": []}
    want = e3.generate(golden_target, golden_draft, [ASKED, [0, 9, 1]], 16, **options)
    assert out == f"--- a\n{text_of(want.tokens[0])}\n--- b\n{text_of(want.tokens[1])}\n"
    line = r"\[chain:2: first token after [\d.]+ m?s, 16 tokens, then [\d.]+ tokens/s, acceptance length \d.\d\d; ended at the limit"
    assert re.fullmatch(rf"{line}(; compiling took .* more)?\]\n{line}\]\n", err)
    # Without a tokenizer, ids.
    argv = (*words[:-2], "--prompt-ids", "0,5,6,1", "--temperature", "0.8", "--seed", "3", "--stream", "--cycles", "2", "--quiet")
    assert run_script(GENERATE, *argv) == 0
    assert capsys.readouterr() == (" ".join(map(str, want.tokens[0])) + "\n", "")
    for other in ("--compare", "--json", "--show-tree", "--batch=2"):
        assert run_script(GENERATE, *words, "--prompt-ids", "1", "--stream", other) == 2
        assert f"--stream does not go with {other.split('=')[0]}" in capsys.readouterr().err


def test_ctrl_c_ends_a_stream_with_a_clean_line(words, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    interrupt(monkeypatch, 3)
    assert run_script(GENERATE, *words, "w5 w6", "--stream") == 130
    out, err = capsys.readouterr()
    assert out.endswith("\n") and 2 < len(out.split()) < 16
    assert "ended at your wish" in err and err.endswith("eagle3-generate: interrupted\n")


def interrupt(monkeypatch, at: int) -> None:
    """Ctrl-C while the event of this number is being shown."""
    push, calls = TextPieces.push, []

    def pushed(self, ids):
        calls.append(ids)
        if len(calls) == at:
            raise KeyboardInterrupt
        return push(self, ids)

    monkeypatch.setattr(live.TextPieces, "push", pushed)


def test_chat_keeps_what_was_said(words, golden_target, golden_draft, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6\nw7\n\n/new\n/what now\nw5 w6\n/quit\nw8\n"))
    assert run_script(CHAT, *words) == 0
    out, err = capsys.readouterr()
    options = {"tree": e3.Chain(2), "eos_token_ids": []}
    first = e3.generate(golden_target, golden_draft, [ASKED], 16, **options).tokens[0]
    second = e3.generate(golden_target, golden_draft, [[*ASKED, *first, 0, 7, 1]], 16, **options).tokens[0]
    assert out.splitlines() == [text_of(first), text_of(second), text_of(first)]
    kept = [int(n) for n in re.findall(r"; (\d+) tokens kept from before\]", err)]
    # Nothing; all but the pending token and the last cycle's; the whole prompt but its last token.
    assert kept[0] == 0 and len(ASKED) + 16 - 4 <= kept[1] < len(ASKED) + 16 and kept[2] == len(ASKED) - 1
    assert "eagle3-chat: /what is unknown" in err


def test_ctrl_c_cuts_an_answer_short_and_the_chat_goes_on(words, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    typed = iter(["w5 w6", "w7"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed, None) or raising())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    interrupt(monkeypatch, 3)
    assert run_script(CHAT, *words) == 130  # at the prompt, Ctrl-C ends the chat
    out, err = capsys.readouterr()
    short, whole = out.splitlines()
    assert 2 < len(short.split()) < len(whole.split()) == 16
    assert "ended at your wish" in err and "eagle3-chat: interrupted" in err


def raising() -> str:
    raise KeyboardInterrupt


def test_mistakes_of_a_chat_take_one_line(models, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    assert run_script(CHAT, *models) == 2
    assert "no tokenizer" in capsys.readouterr().err
    assert run_script(CHAT, *models, "--no-chat-template") == 2
    assert "leave --no-chat-template out" in capsys.readouterr().err
    save_word_tokenizer(tmp_path, template=None)
    assert run_script(CHAT, *models, "--tokenizer", str(tmp_path)) == 2
    assert "needs a tokenizer with a chat template" in capsys.readouterr().err
    save_word_tokenizer(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 " * 3000 + "\n"))
    assert run_script(CHAT, *models, "--tokenizer", str(tmp_path)) == 0
    assert "more than fit into the target's context" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_real_ctrl_c(models) -> None:
    """SIGINT to a running stream: exit code 130, the line ended, nothing but one message."""
    command = [sys.executable, str(ROOT / "infer" / "generate.py"), *models, "--prompt-ids", "3,14,15", "--stream", "--ignore-eos"]
    command += ["--max-new-tokens", "1900", "--tree", "chain:2", "--cycles", "1", "--no-compilation-cache", "--layout", "plain"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    # The answer may be over before the signal is there; then once more.
    for _ in range(8):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        head = process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=300)
        if process.returncode != 0:
            break
    assert process.returncode == 130
    assert (head + rest).endswith(b"\n")
    assert err.decode().splitlines()[-1] == "eagle3-generate: interrupted"
