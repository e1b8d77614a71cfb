"""eagle3-lossless on the tiny pair: all cases, going on where it stopped, another run refused, a fault found and told by the exit code."""

import dataclasses
import json

import pytest
from command_scripts import load_script, run_script

from eagle3_jax.bench import lossless
from eagle3_jax.decoding import auto
from eagle3_jax.tuning.costs import Costs

SCRIPT = load_script("lossless")


@pytest.fixture
def argv(golden, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [5 + i, 9, 30 + 2 * i, 7, *[8] * 600]}) + "\n" for i in range(4)))
    options = ["--trees", "plain", "chain:3", "--temperatures", "0", "--batches", "4", "--max-new-tokens", "12"]
    files = [str(prompts), "--target", str(golden / "target"), "--draft", str(golden / "head"), "--out", str(tmp_path / "out.jsonl")]
    return [*files, *options, "--prompt-tokens", "4"]


@pytest.mark.slow
def test_every_case_once(argv, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run_script(SCRIPT, *argv) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    summary = f"2 cases, {sum(line['positions'] for line in lines[1:])} positions: 0 near-ties, 0 faults"
    assert summary in capsys.readouterr().out
    assert lines[0]["prompts"] == [[5 + i, 9, 30 + 2 * i, 7] for i in range(4)]
    assert len(lines) == 3 and min(line["positions"] for line in lines[1:]) > 20
    taus = {line["case"].split()[0]: line["acceptance_length"] for line in lines[1:]}
    assert taus["plain"] == 1.0 < taus["chain:3"]
    # The last case was cut off in the middle of its line: it alone is run again.
    text = out.read_text()
    out.write_text(text[:-20])
    assert run_script(SCRIPT, *argv) == 0
    printed = capsys.readouterr()
    assert "line 3 is not complete" in printed.err
    assert printed.out.count("positions,") == 1 and summary in printed.out
    assert run_script(SCRIPT, *argv, "--max-new-tokens", "11") == 2
    assert "holds another run" in capsys.readouterr().err


def test_a_fault_is_told(argv, monkeypatch, capsys):
    generate = lossless.generate

    def wrong(target, draft, *rest):
        out = generate(target, draft, *rest)
        changed = [[*row[:5], (row[5] + 1) % 160, *row[6:]] if len(row) > 5 else row for row in out.tokens]
        return out if draft is None else dataclasses.replace(out, tokens=changed)

    monkeypatch.setattr(lossless, "generate", wrong)
    assert run_script(SCRIPT, *argv) == 1
    out = capsys.readouterr().out
    faults = out.count("FAULT: prompt")
    assert faults > 0 and out.count("position 9:") == faults and f"{faults} faults; written to" in out


@pytest.mark.slow
def test_a_slice_of_every_dimension(argv, tmp_path, monkeypatch):
    """A tree and what "auto" chooses, sampled, on a mesh and not, as a stream and not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Made-up costs, by which drafting pays: the choice is then the acceptance's alone.
    monkeypatch.setattr(auto, "measure", lambda target, draft, batch: Costs(1, {1: 1.0, 64: 1.1}, {2: 0.01}, {1: 0.01}))
    ways = ["--trees", "tree:16,4,4", "auto", "--meshes", "none", "data=2,tensor=2", "--streams", "no", "yes"]
    assert run_script(SCRIPT, *argv, "--temperatures", "0.8", *ways, "--max-new-tokens", "24") == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()][1:]
    assert len({line["case"] for line in lines}) == 2**3
    assert {line["positions"] for line in lines} == {lines[0]["positions"]} and lines[0]["positions"] > 4 * 5
    assert min(line["acceptance_length"] for line in lines) > 1.0, "a draft that is never right shows nothing"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--filters", "40"], "TOP_K,TOP_P"),
        (["--trees", "bush"], "is not understood"),
        (["--out", "out.json"], "ends in .jsonl"),
        (["--draft-model", "x"], "not both"),
    ],
)
def test_mistakes_take_one_line(argv, extra, words, capsys):
    assert run_script(SCRIPT, *argv, *extra) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
