"""What the commands share: exit codes, one line per error and warning, files written whole."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import pytest

from eagle3_jax.commands import check_writable, positive, run_command, temperature
from eagle3_jax.decoding.generate import NonFiniteLogitsError, Output
from eagle3_jax.whole_file import write_json

QUIET = argparse.Namespace(traceback=False)


def raising(error: BaseException):
    def main(args: argparse.Namespace) -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("no such\n  thing"), 2, "cmd: no such thing"),
        (OSError(13, "Permission denied", "/x"), 2, "cmd: [Errno 13] Permission denied: '/x'"),
        (ImportError("install it with: pip install x"), 2, "cmd: install it with: pip install x"),
        (NonFiniteLogitsError({0: 7}, Output([[]], ["length"], [[]])), 1, "cmd: the target's logits are not finite: row 0 at position 7"),
        (KeyboardInterrupt(), 130, "cmd: interrupted"),
    ],
)
def test_exit_codes(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture) -> None:
    with warnings.catch_warnings():
        assert run_command("cmd", raising(error), QUIET) == code
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_mistakes_of_the_program_keep_their_traceback() -> None:
    with warnings.catch_warnings():
        with pytest.raises(ZeroDivisionError):
            run_command("cmd", raising(ZeroDivisionError()), QUIET)
        with pytest.raises(ValueError, match="asked for"):
            run_command("cmd", raising(ValueError("asked for")), argparse.Namespace(traceback=True))


def test_warnings_take_one_line(capsys: pytest.CaptureFixture) -> None:
    def main(args: argparse.Namespace) -> None:
        warnings.simplefilter("always")
        warnings.warn("the draft is dead", stacklevel=1)

    with warnings.catch_warnings():
        assert run_command("cmd", main, QUIET) == 0
    assert capsys.readouterr().err == "cmd: warning: the draft is dead\n"


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": [1, "é"]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1, "é"]}
    for unwritable, error in (({"a": float("nan")}, ValueError), ({"a": {1, 2}}, TypeError)):
        with pytest.raises(error):
            write_json(path, unwritable)
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1, "é"]}
    assert list(tmp_path.iterdir()) == [path]
    check_writable(path, ".json")
    for bad, words in ((tmp_path / "no" / "a.json", "no folder"), (tmp_path / "a.txt", r"ends in \.json")):
        with pytest.raises(ValueError, match=words):
            check_writable(bad, ".json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        check_writable(tmp_path / "folder.json", ".json")


def test_numbers() -> None:
    assert positive("3") == 3
    assert temperature("0.5") == 0.5
    for text in ("0", "-1", "x", "1.5", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
            positive(text)
    for text in ("-0.1", "nan", "inf", "hot"):
        with pytest.raises(argparse.ArgumentTypeError, match="finite number"):
            temperature(text)
