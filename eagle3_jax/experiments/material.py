"""What every experiment shares: the target, the text it wrote, cached features, and prompts to measure on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from eagle3_jax.config import default_taps
from eagle3_jax.decoding.generate import generate
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.target import Target
from eagle3_jax.training.features import Selection, select
from eagle3_jax.training.train import STARTS, TrainJob, beginning, cache_features, select_examples
from eagle3_jax.training.trainer import TrainConfig
from eagle3_jax.training.ttt import Frozen
from eagle3_jax.weights import load_draft, load_target
from eagle3_jax.whole_file import whole_file


@dataclasses.dataclass(frozen=True)
class Setting:
    """The sizes of an experiment; the defaults are minutes for a target of some hundred thousand parameters.

    target: folder, hub id, .gguf file or built-in name. data: conversations or a prepared folder; None: `stories` texts of
    `story_tokens` tokens that the target writes itself, from its beginning-of-text token, at temperature `story_heat`.
    hold_out: examples at the end that are never trained on; prompts are their beginnings. max_tokens: longer examples are cut.
    start, draft_vocab: as in `TrainJob`, but that draft_vocab None is the whole vocabulary where the head is a new one.
    ttt_steps: J of EAGLE-3. steps ... seed: as in `TrainConfig`.
    prompts, new_tokens, batch, chain: prompts decoded greedily, tokens each, decoded together, drafts per cycle.
    prompt_tokens: tokens of the answer that a prompt already holds, so that prompts of one beginning differ.
    """

    target: str
    data: str | None = None
    stories: int = 1024
    story_tokens: int = 192
    story_heat: float = 0.8
    hold_out: int = 64
    max_tokens: int = 640
    start: str = "random"
    draft_vocab: int | None = None
    ttt_steps: int = 7
    steps: int = 300
    rows: int = 8
    row_tokens: int = 192
    row_slots: int = 192
    peak_lr: float = 4e-3
    warmup: int = 20
    seed: int = 0
    prompts: int = 48
    prompt_tokens: int = 16
    new_tokens: int = 96
    batch: int = 16
    chain: int = 8

    @property
    def longest(self) -> int:
        """Tokens per example at most."""
        return self.story_tokens if self.data is None else self.max_tokens


class Material:
    """Made once per setting and folder: what an earlier run left there is taken over."""

    def __init__(self, setting: Setting, out: str | Path):
        self.setting, self.out = setting, Path(out)
        self.out.mkdir(parents=True, exist_ok=True)
        if setting.start not in STARTS and setting.draft_vocab:
            raise ValueError(f"start {setting.start}: an existing head brings its draft vocabulary along; leave draft_vocab unset")
        self.target = load_target(setting.target)
        if setting.data is None:
            everything = select(list(_labelled(own_text(self.target, setting, self.out))), setting.longest)
            cut = len(everything.examples) - setting.hold_out
            if cut < 1:
                raise ValueError(f"stories: {len(everything.examples)} texts, no more than the {setting.hold_out} held out")
            self.training = dataclasses.replace(everything, examples=everything.examples[:cut])
            self.held_out = everything.examples[cut:]
        else:
            job = TrainJob(setting.target, setting.data, str(out), max_tokens=setting.max_tokens, hold_out=setting.hold_out)
            fitting = TrainConfig(row_tokens=setting.row_tokens, row_slots=setting.row_slots, seed=setting.seed)
            self.training, held_out = select_examples(job, fitting)
            self.held_out = held_out.examples

    @property
    def top(self) -> tuple[int]:
        """The tap of EAGLE's feature: the final normed state."""
        return (self.target.config.num_layers,)

    @property
    def fused(self) -> tuple[int, ...]:
        """EAGLE-3's taps, or those of the head that every arm starts from."""
        head = self.given()
        return default_taps(self.target.config.num_layers) if head is None else head.config.taps

    @property
    def from_head(self) -> bool:
        """Whether every arm goes on from one existing head."""
        return self.setting.start not in STARTS

    def given(self) -> Eagle3Draft | None:
        """The head that the setting's start names, float32; None where it names none."""
        return load_draft(self.setting.start, self.target, layout="plain") if self.from_head else None

    def beginning(self, config: TrainConfig, taps: tuple[int, ...], draft_vocab: int | None) -> tuple[Eagle3Draft, Frozen]:
        """A draft before its first update. draft_vocab: U, None: the setting's.

        Raises ValueError where the setting starts from a head that has other taps, or draft_vocab is asked for beside it.
        """
        start, given = self.setting.start, self.given()
        if given is None:
            size = draft_vocab or self.setting.draft_vocab or self.target.config.vocab_size
            return beginning(self.target, self.training, config, start=start, given=None, draft_vocab=size, taps=taps)
        if draft_vocab or taps != given.config.taps:
            raise ValueError(
                f"start {start}: an existing head keeps its taps and draft vocabulary, and this experiment changes one of them"
            )
        return beginning(self.target, self.training, config, start=start, given=given)

    def features(self, taps: tuple[int, ...], held_out: bool = False) -> Path:
        """The folder of the features of the training (or held-out) text at these taps, made when it is missing."""
        chosen = Selection(self.held_out, 0, 0) if held_out else self.training
        folder = self.out / f"{'held-out' if held_out else 'features'}-{'-'.join(map(str, taps))}"
        cache_features(self.target, taps, chosen, folder, self.setting.longest)
        return folder

    def prompts(self) -> list[list[int]]:
        """Beginnings of held-out examples, up to their first answer and `prompt_tokens` of it."""
        found = []
        for ids, response in self.held_out:
            start = int(np.argmax(response > 0)) + self.setting.prompt_tokens
            if 0 < start <= len(ids):
                found.append([int(i) for i in ids[:start]])
        if not found:
            raise ValueError("no held-out example is long enough for a prompt")
        return found[: self.setting.prompts]


def own_text(target: Target, setting: Setting, folder: Path) -> np.ndarray:
    """int32 [stories, story_tokens]: texts sampled from the target, each behind its beginning-of-text token. Kept in `folder`."""
    bos = target.config.bos_token_id
    if bos is None:
        raise ValueError(f"{setting.target}: names no beginning-of-text token to write from; give conversations with data")
    made = (setting.stories, setting.story_tokens)
    file = folder / f"text-{made[0]}x{made[1]}-heat{setting.story_heat:g}-seed{setting.seed}.npy"
    if file.is_file():
        return np.load(file)
    rows: list[list[int]] = []
    for start in tqdm(range(0, setting.stories, 64), desc="writing text", unit=" batches", disable=None):
        # A full batch every time: one program.
        seeds = [setting.seed * setting.stories + start + i for i in range(64)]
        out = generate(target, None, [[bos]] * 64, made[1] - 1, temperature=setting.story_heat, seed=seeds, eos_token_ids=[])
        rows.extend([bos, *tokens] for tokens in out.tokens)
    text = np.asarray(rows[: setting.stories], np.int32)
    with whole_file(file) as part:
        np.save(part, text)
    return text


def _labelled(text: np.ndarray) -> Iterator[_Example]:
    for ids in text:
        response = np.ones_like(ids)
        response[0] = 0
        yield _Example(ids, response)


@dataclasses.dataclass(frozen=True)
class _Example:
    ids: np.ndarray
    response: np.ndarray
