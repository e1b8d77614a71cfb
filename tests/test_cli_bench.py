"""eagle3-bench on the tiny pair: the table, the JSON file, several sets, and mistakes before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_scripts import load_script, run_script, save_word_tokenizer

from eagle3_jax.bench import plan_run as tuning
from eagle3_jax.decoding import auto
from eagle3_jax.tree import Tree
from eagle3_jax.tuning.costs import Costs

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
    assert "the 2 sets and their mean, T = 0" in captured.out
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


@pytest.mark.slow
def test_throughput_without_a_draft(base, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, figures = tmp_path / "plain.json", tmp_path / "figures"
    files = ["--out", str(out), "--figures", str(figures)]
    # Tokens enough that the prompt's pass, which is taken off, is not all of the time.
    options = ["--draft", "none", "--limit", "1", "--batches", "1", "2", "--max-new-tokens", "64", *files]
    assert run_script(SCRIPT, str(folder / "sums.jsonl"), *base, *options) == 0
    assert "plain, over batch 1" in capsys.readouterr().out
    written = json.loads(out.read_text(encoding="utf-8"))
    assert [(t["batch"], t["mode"], t["speed_up"]) for t in written["throughput"]] == [(1, "plain", None), (2, "plain", None)]
    assert [path.name for path in figures.iterdir()] == ["throughput.png"]


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
        ([], "no SET of prompts given"),
        (["talk.jsonl", "--plot", "table.png"], "--plot draws the table of --plan"),
        (["--plan", "--plot", "table.jpg"], "ends in .png"),
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


def test_plan(base, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    """Acceptance counted on the prompts, made-up costs: the table, the picture, the choice kept and found again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(auto, "measure", lambda target, draft, batch: Costs(1, {1: 1.0, 64: 1.1}, {2: 0.01}, {1: 0.01}))
    monkeypatch.setattr(tuning, "largest_tree", lambda draft: Tree(12, 3, 3))
    picture = tmp_path / "tuning.png"
    options = ["--plot", str(picture), "--max-new-tokens", "24", "--ignore-eos", "--limit", "2"]
    assert run_script(SCRIPT, "--plan", str(folder / "talk.jsonl"), *base, *options) == 0
    out = capsys.readouterr().out
    assert "talk: 2 prompts, T = 0, at most 24 tokens each" in out
    assert "width 3" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    chosen = out.split("chosen: ")[1].split()[0]
    assert chosen != "plain"
    assert f"{chosen} " in next(line for line in out.splitlines() if line.endswith("<- chosen"))
    (kept,) = (tmp_path / "eagle3_jax" / "plans").iterdir()
    assert f"kept in {kept}" in out
    assert json.loads(kept.read_text())["summary"]["chosen"] == chosen
    # Without prompts the counts are those kept; costs are measured anew, here such that nothing pays.
    monkeypatch.setattr(auto, "measure", lambda target, draft, batch: Costs(1, {1: 1.0, 2: 9.0}, {2: 0.1}, {1: 0.1}))
    assert run_script(SCRIPT, *base, "--plan") == 0
    out = capsys.readouterr().out
    assert "talk: 2 prompts" in out
    assert "chosen: plain (" in out


@pytest.mark.slow
def test_everything_at_once_and_resumed(base, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    out, figures = tmp_path / "all.json", tmp_path / "figures"
    options = ["--trees", "chain:2", "--max-new-tokens", "16", "--ignore-eos", "--limit", "2", "--out", str(out), "--figures", str(figures)]
    more = ["--phases", "--bursts", "1", "--batches", "1", "2"]
    assert run_script(SCRIPT, str(folder / "talk.jsonl"), *base, *options, *more) == 0
    first = capsys.readouterr().out
    assert sorted(path.name for path in figures.iterdir()) == ["cycle.png", "n-alpha-T0.png", "sets-T0.png", "throughput.png"]
    written = json.loads(out.read_text(encoding="utf-8"))
    assert [p["mode"] for p in written["phases"]] == ["plain", "chain:2"]
    for part in written["phases"]:
        assert part["verify"] > 0
        assert part["whole"] == pytest.approx(part["draft"] + part["verify"] + part["commit"] + part["rest"])
    assert written["phases"][0]["draft"] == 0.0
    assert [(t["batch"], t["mode"]) for t in written["throughput"]] == [(b, m) for b in (1, 2) for m in ("plain", "chain:2", "chain:3")]
    stepped = written["results"][0]["bursts"]
    assert stepped["plain"]["mean_tokens"] == 1.0
    # A stepped decode keeps what the one-program decode keeps, cycle by cycle.
    kept = next(s for s in written["results"][0]["samples"] if s["mode"] == "chain:2" and s["prompts"] == [0])["accept_lengths"][0]
    assert stepped["chain:2"]["count"] == len(kept)
    assert stepped["chain:2"]["mean_tokens"] == pytest.approx(sum(kept) / len(kept))
    assert "gain ends at" in first
    assert "tokens a burst" in first
    memory = {m["mode"]: m["memory_bytes"] for m in written["results"][0]["modes"]}
    assert memory["chain:2"] > memory["plain"] > 0
    assert not list(tmp_path.glob("*.journal*"))

    # Interrupted in the sweep: what was measured is taken over, and nothing is decoded twice.
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("eagle3_jax.bench.run._phases", interrupted)
        assert run_script(SCRIPT, str(folder / "talk.jsonl"), *base, *options, "--phases") == 130
    assert len((tmp_path / "all.json.journal.part").read_text().splitlines()) == 1 + 4
    assert run_script(SCRIPT, str(folder / "talk.jsonl"), *base, *options, "--phases", "--resume", "--batch", "2") == 2
    assert "another run; batch: there 1, now 2" in capsys.readouterr().err
    monkeypatch.setattr("eagle3_jax.bench.benchmark._timed", lambda *_: pytest.fail("decoded again"))
    assert run_script(SCRIPT, str(folder / "talk.jsonl"), *base, *options, "--phases", "--resume") == 0
    again = json.loads(out.read_text(encoding="utf-8"))
    assert [s["tokens"] for s in again["results"][0]["samples"]] == [s["tokens"] for s in written["results"][0]["samples"]]


def test_help(capsys: pytest.CaptureFixture) -> None:
    assert run_script(SCRIPT, "--help") == 0
    out = capsys.readouterr().out
    assert "(default: bench.json)" in out
    assert "n-alpha" in out
    assert "eagle3-bench mt_bench.jsonl" in out
