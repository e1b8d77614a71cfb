"""An arm of an experiment: one head, trained one way, measured by real decoding."""

from __future__ import annotations

import dataclasses
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.bench.evaluate import Interval, acceptance_length, bootstrap, kept_and_cycles, n_alpha_intervals, tokens_per_cycle
from eagle3_jax.decoding.generate import Output, generate
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.drafting import Draft
from eagle3_jax.experiments.material import Material, Setting
from eagle3_jax.params import named_variables
from eagle3_jax.training.batches import BatchSource
from eagle3_jax.training.features import open_cache
from eagle3_jax.training.fit import fit
from eagle3_jax.training.reporting import Reporter
from eagle3_jax.training.trainer import TrainConfig
from eagle3_jax.training.ttt import Recipe, recipe
from eagle3_jax.training.writers import JsonLines
from eagle3_jax.tree import Chain
from eagle3_jax.weights import load_draft, save_head
from eagle3_jax.weights.dialects import suited
from eagle3_jax.whole_file import write_json


@dataclasses.dataclass(frozen=True)
class Arm:
    """name: of the arm and its folder. top: the head reads the target's final state alone, as in EAGLE; otherwise EAGLE-3's three taps.

    steps: J; 1 is no training-time test. None: the setting's. feature_loss: EAGLE's regression beside 0.1 times the loss over the
    vocabulary, with fc the identity and the target's own head, both frozen. loss: over the vocabulary; None: the recipe's. data: share of
    the training examples. draft_vocab: U, None: the setting's. of: name of the recipe. peak_lr: None: the setting's. trained: False
    measures what the setting starts from.
    """

    name: str
    top: bool = False
    steps: int | None = None
    feature_loss: bool = False
    loss: str | None = None
    data: float = 1.0
    draft_vocab: int | None = None
    of: str = "aligned"
    peak_lr: float | None = None
    trained: bool = True

    def recipe(self, setting: Setting) -> Recipe:
        changes: dict[str, Any] = {"steps": self.steps or setting.ttt_steps}
        if self.loss is not None:
            changes["loss"] = self.loss
        if self.feature_loss:
            changes |= {"feature_weight": 1.0, "logit_weight": 0.1, "train_head": False, "train_fusion": False}
        return recipe(self.of, **changes)


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """What an arm reached. n_alpha: n = 0 ... chain-1, greedy. cycle_seconds: of one decode cycle of the whole batch, the fastest seen.

    by_prompt: (tokens kept, cycles) of every prompt; the same prompts in every arm of a setting.

    coverage: share of held-out answer tokens inside the draft vocabulary. parameters: of the head, trained or not.
    """

    name: str
    acceptance_length: Interval
    by_prompt: list[tuple[int, int]]
    n_alpha: list[Interval | None]
    loss: float | None
    examples: int
    draft_vocab: int
    coverage: float
    parameters: int
    train_seconds: float
    cycle_seconds: float | None

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> ArmResult:
        intervals = [None if x is None else Interval(**x) for x in value["n_alpha"]]
        pairs = [(tokens, cycles) for tokens, cycles in value["by_prompt"]]
        return cls(**{**value, "acceptance_length": Interval(**value["acceptance_length"]), "by_prompt": pairs, "n_alpha": intervals})

    def percent_over(self, other: ArmResult) -> Interval:
        """How many per cent this acceptance length is above the other's. The interval is over prompts, each with both its figures: what
        makes a prompt easy for either head falls out of it."""
        pairs = np.concatenate([self.by_prompt, other.by_prompt], axis=1)
        length = tokens_per_cycle
        return bootstrap(pairs, lambda sums: 100 * (length(sums[..., 0], sums[..., 1]) / length(sums[..., 2], sums[..., 3]) - 1))


def run_arm(material: Material, arm: Arm) -> ArmResult:
    """Trains and measures an arm, or reads what an earlier run of the same arm and setting left in its folder."""
    folder = arm_folder(material, arm)
    about = {"arm": dataclasses.asdict(arm), "setting": dataclasses.asdict(material.setting)}
    file = folder / "result.json"
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["about"] == about:
            return ArmResult.from_dict(found["result"])
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    draft, loss, examples = train_arm(material, arm)
    seconds = time.perf_counter() - start
    outputs, cycle = decode(material, draft)
    kept = np.asarray(draft.d2t[...])
    answers = np.concatenate([ids[response > 0] for ids, response in material.held_out])
    result = ArmResult(
        name=arm.name,
        acceptance_length=acceptance_length(outputs),
        by_prompt=kept_and_cycles(outputs),
        n_alpha=n_alpha_intervals(outputs, material.setting.chain),
        loss=loss,
        examples=examples,
        draft_vocab=len(kept),
        coverage=float(np.isin(answers, kept).mean()),
        parameters=sum(v.get_value().size for name, v in named_variables(draft) if name != "d2t"),
        train_seconds=seconds,
        cycle_seconds=cycle,
    )
    save_head(draft, folder / "head", dtype="float32", overwrite=True, dialect=suited(draft.config).name)
    write_json(file, {"about": about, "result": dataclasses.asdict(result)})
    return result


def arm_folder(material: Material, arm: Arm) -> Path:
    return material.out / "arms" / arm.name.replace("/", "of").replace(" ", "-")


def trained_head(material: Material, arm: Arm) -> Eagle3Draft:
    """The head of an arm, trained if need be."""
    run_arm(material, arm)
    return load_draft(arm_folder(material, arm) / "head", material.target)


def train_arm(material: Material, arm: Arm, evaluate_every: int | None = None) -> tuple[Eagle3Draft, float | None, int]:
    """(trained head, loss of the last update, training examples).

    evaluate_every: updates between measurements on the held-out text, which go to `log.jsonl` in the arm's folder; None: none.
    """
    setting, target = material.setting, material.target
    taps = material.top if arm.top else material.fused
    folder = material.features(taps)
    rule = arm.recipe(setting)
    config = TrainConfig(
        recipe=rule,
        steps=setting.steps,
        rows=setting.rows,
        row_tokens=setting.row_tokens,
        row_slots=setting.row_slots,
        peak_lr=arm.peak_lr or setting.peak_lr,
        warmup=min(setting.warmup, setting.steps),
        seed=setting.seed,
    )
    draft, tables = material.beginning(config, taps, arm.draft_vocab)
    if not arm.trained:
        return draft, None, 0
    if not rule.train_fusion:
        # The state fed back stands for the target's feature, so both must be measured alike.
        draft.fc[...] = jnp.eye(target.config.hidden_size, dtype=draft.dtype)
    examples = max(1, round(arm.data * len(material.training.examples)))
    batches = partial(BatchSource, recipe=rule, seed=setting.seed, rows=config.rows, width=config.row_tokens, slots=config.row_slots)
    source = batches(lambda: open_cache(folder), limit=examples)
    held_out = None
    if evaluate_every is not None:
        unseen = material.features(taps, held_out=True)
        held_out = batches(lambda: open_cache(unseen)).once
    log = arm_folder(material, arm) / "log.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    reporter = Reporter(config.steps, writers=[JsonLines(log)], every=max(1, config.steps // 3))
    try:
        every = evaluate_every or config.steps
        trained = fit(draft, tables, source, config, reporter=reporter, held_out=held_out, evaluate_every=every)
    finally:
        reporter.close()
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    return trained, losses[-1] if losses else None, examples


def decode(material: Material, draft: Draft, **options: Any) -> tuple[list[Output], float | None]:
    """(outputs of all prompts with a chain, seconds of a cycle); `options` as in `generate`."""
    setting = material.setting
    prompts, outputs, cycles = material.prompts(), [], []
    for start in range(0, len(prompts), setting.batch):
        rows = prompts[start : start + setting.batch]
        begin = time.perf_counter()
        output = generate(
            material.target,
            draft,
            rows,
            setting.new_tokens,
            tree=Chain(setting.chain),
            eos_token_ids=[] if setting.data is None else None,
            seed=[setting.seed + start + i for i in range(len(rows))],
            **options,
        )
        passes = max(map(len, output.accept_lengths))
        if passes and start:  # the first call may compile
            cycles.append((time.perf_counter() - begin) / passes)
        outputs.append(output)
    return outputs, min(cycles, default=None)
