"""Sets of prompts: files, folders, the paper's sets on the hub."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from eagle3_jax.bench.prompt_sets import PAPER_SETS, read_sets, spread
from eagle3_jax.prompts import PromptError


def write(folder: Path, name: str, count: int = 4) -> None:
    records = ({"id": f"{name}/{i}", "turns": [f"question {i}"]} for i in range(count))
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")


def test_a_folder_holds_the_papers_sets_in_its_order_or_all(tmp_path: Path) -> None:
    write(tmp_path, "own")
    write(tmp_path, "another")
    (tmp_path / "SOURCES.md").write_text("no prompts")
    assert list(read_sets([str(tmp_path)])) == ["another", "own"]
    write(tmp_path, "gsm8k")
    write(tmp_path, "mt_bench")
    sets = read_sets([str(tmp_path), str(tmp_path / "own.jsonl")], limit=2)
    assert list(sets) == ["mt_bench", "gsm8k", "own"]
    assert [prompt.name for prompt in sets["own"]] == ["own/0", "own/2"]
    with pytest.raises(PromptError, match="same name, gsm8k"):
        read_sets([str(tmp_path), str(tmp_path / "gsm8k.jsonl")])
    with pytest.raises(PromptError, match="nowhere: no such file or folder"):
        read_sets(["nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(PromptError, match="no file of prompts"):
        read_sets([str(tmp_path / "empty")])


def test_the_papers_sets_come_from_the_hub_in_its_wording(monkeypatch: pytest.MonkeyPatch) -> None:
    records = {
        "HuggingFaceH4/mt_bench_prompts": {"prompt": ["first turn", "second turn"]},
        "openai/openai_humaneval": {"prompt": "def f():"},
        "openai/gsm8k": {"question": "1 + 1?", "answer": "2"},
        "tatsu-lab/alpaca": {"instruction": "Add.", "input": "1, 2", "output": "3"},
        "abisee/cnn_dailymail": {"article": "News.", "highlights": ""},
    }
    asked = []

    def load_dataset(name: str, config: str | None = None, *, split: str) -> list[dict]:
        asked.append((name, config, split))
        return [records[name]] * 3

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    sets = read_sets(["paper"], limit=2)
    assert list(sets) == list(PAPER_SETS)
    assert all(len(prompts) == 2 for prompts in sets.values())
    words = [prompts[0].messages[0]["content"] for prompts in sets.values()]
    assert words == ["first turn", "Complete the code I provided.\n\ndef f():", "1 + 1?", "Add.\n1, 2", "Summarize: News."]
    assert ("openai/gsm8k", "main", "test") in asked
    assert ("abisee/cnn_dailymail", "3.0.0", "test") in asked
    records["openai/gsm8k"] = {"text": "renamed"}
    with pytest.raises(PromptError, match="no longer hold what they held"):
        read_sets(["gsm8k"])


def test_limit_spreads() -> None:
    assert spread(list(range(80)), 4) == [0, 20, 40, 60]  # type: ignore[arg-type]
    assert spread([1, 2], 5) == [1, 2]  # type: ignore[arg-type]
    assert spread([1, 2], None) == [1, 2]  # type: ignore[arg-type]
