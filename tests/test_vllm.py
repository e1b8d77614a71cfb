"""vLLM serves what is written here: a target and its head in every dialect give the same text, the same drafts, the same acceptance.

It needs torch and lives in an environment of its own: EAGLE3_VLLM_PYTHON names that environment's interpreter.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from foreign_python import foreign_python
from test_weights_heads import make_head

from eagle3_jax.bench.evaluate import acceptance
from eagle3_jax.bench.lossless import Settings, compare
from eagle3_jax.bench.prompt_sets import read_sets
from eagle3_jax.convert import convert_head, convert_target
from eagle3_jax.decoding.generate import Output, generate
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import fill, named_variables
from eagle3_jax.target import Target
from eagle3_jax.tokenizer import chat_ids, load_tokenizer
from eagle3_jax.tree import Chain
from eagle3_jax.weights import load_draft, load_target, save_head

SCRIPT = Path(__file__).parent / "vllm_decode.py"
NAME, DRAFTS = "smollm2-135m", 3


class Models(NamedTuple):
    """The target as it is loaded here and the folder that vLLM gets."""

    target: Target
    folder: Path
    tokenizer: Any


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter that can import vLLM; skips without one."""
    return foreign_python("vllm")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(load_target(NAME), convert_target(NAME, tmp_path_factory.mktemp("target") / "folder"), load_tokenizer(NAME))


def decode(python: str, models: Models, head: Path, chats: list[Any], new_tokens: int) -> dict[str, Any]:
    """What `vllm_decode.py` found."""
    work = head.parent / "work.json"
    work.write_text(json.dumps({"chats": chats, "new_tokens": new_tokens, "drafts": DRAFTS}))
    done = subprocess.run([python, SCRIPT, models.folder, head, work], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(work.read_text())


def starts(tokens: list[int], drafted: list[list[int]]) -> dict[int, list[int]]:
    """Drafts by the place of the first of them in the answer: as many stood as the answer goes on with."""
    found, place = {}, 1
    for drafts in drafted:
        if place >= len(tokens):
            break
        found[place] = drafts
        stood = 0
        while stood < len(drafts) and place + stood < len(tokens) and drafts[stood] == tokens[place + stood]:
            stood += 1
        place += stood + 1
    return found


def same_drafts(ours: Output, theirs: dict[str, Any]) -> tuple[int, int]:
    """(cycles whose drafts are the same ones, cycles that start at the same place of the same text)."""
    same = shared = 0
    for row, tokens in enumerate(ours.tokens):
        assert ours.trees is not None
        here, there = starts(tokens, [nodes[1:] for nodes, _ in ours.trees[row]]), starts(tokens, theirs["drafted"][row])
        if tokens != theirs["tokens"][row]:
            continue
        shared += len(here.keys() & there.keys())
        same += sum(here[place] == there[place] for place in here.keys() & there.keys())
    return same, shared


def check_text(models: Models, ours: Output, theirs: dict[str, Any]) -> None:
    """The same tokens, up to a choice that rounding decides."""
    there = Output(theirs["tokens"], ours.finish_reasons, [[]] * len(ours.tokens))
    report = compare(models.target, theirs["prompts"], ours, there, [Settings()] * len(ours.tokens))
    print(f"text: {report.positions} positions, {len(report.divergences)} divergences", *report.divergences)
    assert not report.faults


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["official", "speculators"])
def test_the_same_text_and_acceptance(dialect: str, python: str, models: Models, shared_data: Path, tmp_path: Path):
    """Ten first turns of MT-bench through each one's own tokenizer and chat template."""
    ((_, prompts),) = read_sets([str(shared_data / "prompts" / "mt_bench.jsonl")], 10).items()
    chats = [list(prompt.messages) for prompt in prompts]
    convert_head(NAME, tmp_path / "head", dialect, target=NAME, target_name=str(models.folder))
    theirs = decode(python, models, tmp_path / "head", chats, 64)
    assert theirs["prompts"] == [chat_ids(models.tokenizer, chat) for chat in chats]
    draft = load_draft(tmp_path / "head", models.target)
    ours = generate(models.target, draft, theirs["prompts"], 64, tree=Chain(DRAFTS), record_trees=True)
    check_text(models, ours, theirs)
    assert [models.tokenizer.decode(row, skip_special_tokens=True) for row in theirs["tokens"]] == theirs["texts"]
    counted, counts = theirs["counters"], acceptance(ours, DRAFTS)
    cycles = sum(map(len, ours.accept_lengths))
    here, there = 1 + sum(counts.accepted) / cycles, 1 + counted["num_accepted_tokens"] / counted["num_drafts"]
    by_position = [accepted / counted["num_drafts"] for accepted in counted["num_accepted_tokens_per_pos"]]
    same, shared = same_drafts(ours, theirs)
    print(f"{dialect}: acceptance length {here:.4f} of {cycles} cycles here, {there:.4f} of {counted['num_drafts']} in vLLM")
    print("by position:", counts.per_position, "in vLLM:", by_position, f"- the same drafts in {same} of {shared} cycles")
    assert abs(there / here - 1) < 0.05
    assert same > 0.98 * shared > 100


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "every switch and four taps": (
        "specforge",
        {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True, "taps": (1, 7, 18, 29)},
    ),
    "narrower with its own embedding": ("official", {"hidden_size": 384, "num_heads": 6, "own_embedding": True, "taps": (0, 3, 20)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_drafts_of_variants(variant: str, python: str, models: Models, tmp_path: Path):
    """A random head accepts nothing, but what it drafts tells every way to misread it."""
    dialect, changes = VARIANTS[variant]
    head = tame(make_head(list(range(5, 49152, 24)), models.target.config, **changes))
    folder = save_head(head, tmp_path / "head", dialect=dialect, target_name=NAME)
    chats = [[{"role": "user", "content": text}] for text in ("Why is the sky blue?", "Name three rivers and where they end.")]
    theirs = decode(python, models, folder, chats, 24)
    draft = load_draft(folder, models.target)
    ours = generate(models.target, draft, theirs["prompts"], 24, tree=Chain(DRAFTS), record_trees=True)
    check_text(models, ours, theirs)
    same, shared = same_drafts(ours, theirs)
    print(f"{variant}: the same drafts in {same} of {shared} cycles")
    assert same > 0.95 * shared > 30


def tame(head: Eagle3Draft) -> Eagle3Draft:
    """The head with matrices of unit gain: attention that is no lottery, so that rounding rarely decides a draft."""
    matrices = {name for name, _ in named_variables(head)} - {"fc_norm", "embed"}
    values = {name: variable.get_value() for name, variable in named_variables(head)}
    return fill(head, {n: v * v.shape[0] ** -0.5 if n in matrices and v.ndim == 2 else v for n, v in values.items()})
