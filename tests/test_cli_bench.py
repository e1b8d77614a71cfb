"""eagle3-bench on the tiny pair: the table, the JSON file, several sets, and mistakes before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_scripts import load_script, run_script, save_word_tokenizer

SCRIPT = load_script("bench")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of prompts and a tokenizer."""
    folder = tmp_path_factory.mktemp("bench")
    save_word_tokenizer(folder / "tokenizer")
    sets = {
        "talk": [{"id": f"t/{i}", "turns": [f"w{20 + i} w7 w{30 + 2 * i}", "w9"]} for i in range(4)],
        "sums": [{"prompt_ids": [5, 6, 7]}],
    }
    for name, records in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def base(golden: Path, folder: Path) -> tuple[str, ...]:
    names = {"target": golden / "target", "draft": golden / "head", "tokenizer": folder / "tokenizer"}
    return tuple(part for name, path in names.items() for part in (f"--{name}", str(path)))


def test_table_and_file(base, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "figures.json"
    sets = [str(folder / "talk.jsonl"), str(folder / "sums.jsonl")]
    options = ["--trees", "chain:2", "--max-new-tokens", "16", "--ignore-eos", "--limit", "2", "--repeats", "2", "--out", str(out)]
    assert run_script(SCRIPT, *sets, *base, *options) == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # no bar where there is no terminal
    assert "talk: 2 prompts, T = 0, batch 1" in captured.out
    assert "mean of the 2 sets, T = 0" in captured.out
    assert captured.out.endswith(f"written to {out}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["arguments"]["trees"] == [{"length": 2}]
    talk, sums = written["results"]
    assert (talk["set"], talk["prompts"]) == ("talk", ["t/0", "t/2"])  # --limit spreads over the file
    assert sums["set"] == "sums"
    plain, chain = talk["modes"]
    assert plain["tokens"] == chain["tokens"] == 32
    assert chain["same_text"] == 2
    assert chain["acceptance_length"]["value"] == pytest.approx(30 / chain["cycles"])
    assert plain["compile_seconds"] > 0
    assert sums["modes"][1]["compile_seconds"] == 0.0  # the same shapes: the first set's programs serve
    assert len(talk["samples"]) == 4
    assert len(talk["samples"][0]["seconds"]) == 2
    assert {row.split()[0] for row in captured.out.splitlines() if "chain" in row} == {"chain:2"}
    assert f"{chain['acceptance_length']['value']:.2f} [" in captured.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["talk.jsonl", "--out", "nowhere/figures.json"], "no folder nowhere"),
        (["talk.jsonl", "--out", "figures.txt"], "ends in .json"),
        (["talk.jsonl", "--trees", "chain:x"], "tree 'chain:x' is not understood"),
        (["talk.jsonl", "talk.jsonl"], "same name"),
        (["talk.jsonl", "--limit", "0"], ">= 1"),
        (["talk.jsonl", "--temperature", "-1", "--out", "bench.json"], "--temperature: '-1' must be a finite number"),
        (["talk.jsonl", "--temperature", "0", "nan", "--out", "bench.json"], "--temperature: 'nan' must be"),
        ([], "required"),
    ],
)
def test_mistakes_take_one_line(base, folder: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    assert run_script(SCRIPT, *argv, *base) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
    assert not (folder / "bench.json").exists()


def test_limit_spreads() -> None:
    assert SCRIPT.spread(list(range(80)), 4) == [0, 20, 40, 60]
    assert SCRIPT.spread([1, 2], 5) == [1, 2]
    assert SCRIPT.spread([1, 2], None) == [1, 2]


def test_help(capsys: pytest.CaptureFixture) -> None:
    assert run_script(SCRIPT, "--help") == 0
    out = capsys.readouterr().out
    assert "(default: bench.json)" in out
    assert "n-alpha" in out
    assert "eagle3-bench mt_bench.jsonl" in out
