"""Sets of prompts by name: files, folders, data sets on the hub, and the five sets of the EAGLE papers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3_jax.data.sources import HUB, read_records
from eagle3_jax.prompts import RECORDS, Prompt, PromptError, parse_prompt, read_prompts


@dataclasses.dataclass(frozen=True)
class HubSet:
    """Where a set lies on the hub, and how its records become prompts, in the wording of the official evaluation."""

    dataset: str
    split: str
    words: Callable[[Mapping[str, Any]], str]


PAPER_SETS: dict[str, HubSet] = {
    "mt_bench": HubSet("HuggingFaceH4/mt_bench_prompts", "train", lambda r: r["prompt"][0]),
    "humaneval": HubSet("openai/openai_humaneval", "test", lambda r: f"Complete the code I provided.\n\n{r['prompt']}"),
    "gsm8k": HubSet("openai/gsm8k/main", "test", lambda r: r["question"]),
    "alpaca": HubSet("tatsu-lab/alpaca", "train", lambda r: "\n".join(part for part in (r["instruction"], r.get("input")) if part)),
    "cnn_dm": HubSet("abisee/cnn_dailymail/3.0.0", "test", lambda r: f"Summarize: {r['article']}"),
}
"""The sets of the paper's Table 1, in its order."""


def read_sets(sources: Sequence[str], limit: int | None = None) -> dict[str, list[Prompt]]:
    """Prompts by set name, `limit` of each at even distances (of a set on the hub: the first ones, so that no more is read).

    A source is a file; a folder (the paper's sets that lie in it, or every file of records when none does); the name of one of the
    paper's sets, "paper" for all five, or "hf:OWNER/NAME", read from the hub. Raises PromptError or DataError naming the source.
    """
    sets: dict[str, list[Prompt]] = {}
    for source in sources:
        for name, prompts in _read(source, limit).items():
            if name in sets:
                raise PromptError(f"{source}: two sets have the same name, {name}; their figures could not be told apart")
            sets[name] = spread(prompts, limit)
    return sets


def _read(source: str, limit: int | None) -> dict[str, list[Prompt]]:
    path = Path(source).expanduser()
    if path.is_dir():
        return {_name(file): read_prompts(file) for file in _files(path)}
    if path.is_file():
        return {_name(path): read_prompts(path)}
    if source == "paper":
        return {name: _from_hub(one, limit) for name, one in PAPER_SETS.items()}
    if source in PAPER_SETS:
        return {source: _from_hub(PAPER_SETS[source], limit)}
    if source.startswith(HUB):
        return {source.rpartition("/")[2]: [parse_prompt(record, where) for where, record in islice(read_records(source), limit)]}
    raise PromptError(f"{source}: no such file or folder, nor one of paper, {', '.join(PAPER_SETS)}, {HUB}OWNER/NAME")


def _files(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.iterdir() if file.name.lower().endswith(RECORDS))
    by_name = {_name(file): file for file in found}
    paper = [by_name[name] for name in PAPER_SETS if name in by_name]
    if not found:
        raise PromptError(f"{folder}: no file of prompts in the folder (names ending in {', '.join(RECORDS)})")
    return paper or found


def _from_hub(one: HubSet, limit: int | None) -> list[Prompt]:
    records = islice(read_records(HUB + one.dataset, split=one.split), limit)
    try:
        return [Prompt.of_text(one.words(record), where) for where, record in records]
    except (KeyError, IndexError, TypeError) as error:
        raise PromptError(f"{one.dataset}: its records no longer hold what they held ({error!r})") from None


def _name(file: Path) -> str:
    return file.name.split(".")[0]


def spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """`limit` prompts at even distances: sets are often sorted by category."""
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]
