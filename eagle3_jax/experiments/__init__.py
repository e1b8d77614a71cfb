"""Experiments that can be repeated: the paper's figures and a user's choices, each a function of shared material to results and a PNG."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle3_jax.bench.tables import figure
from eagle3_jax.experiments import choices, paper
from eagle3_jax.experiments.arms import Arm, ArmResult, run_arm, trained_head
from eagle3_jax.experiments.material import Material, Setting
from eagle3_jax.experiments.paper import EAGLE, EAGLE_3
from eagle3_jax.terminal import table
from eagle3_jax.whole_file import write_json

EXPERIMENTS: dict[str, Callable[[Material, Path], list[ArmResult]]] = {
    "n-alpha": paper.n_alpha,
    "ablation": paper.ablation,
    "scaling": paper.scaling,
    "overview": paper.overview,
    "recipes": choices.recipes,
    "rates": choices.rates,
    "losses": choices.losses,
    "ttt-steps": choices.ttt_steps,
    "draft-vocab": choices.draft_vocab,
    "drafting": choices.drafting,
}


def run_experiment(name: str, material: Material, say: Callable[[str], None] = print) -> list[ArmResult]:
    """Runs an experiment into the material's folder: NAME.json and NAME.png. Arms that were trained before are taken over.

    Raises ValueError naming the known experiments for another name.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"experiment {name!r} is unknown (known: {', '.join(EXPERIMENTS)})")
    results = EXPERIMENTS[name](material, material.out / f"{name}.png")
    record = {"experiment": name, "setting": dataclasses.asdict(material.setting), "results": [dataclasses.asdict(r) for r in results]}
    write_json(material.out / f"{name}.json", record)
    say(f"\n{name}: {(EXPERIMENTS[name].__doc__ or '').strip()}\n\n{results_table(results)}\n")
    return results


def results_table(results: Sequence[ArmResult]) -> str:
    """One line per arm; the second figure is the acceptance length against the first arm's, prompt by prompt."""
    rows = [["", "acceptance length", "against the first, %", "n-alpha 0, 1, ...", "examples", "draft vocabulary", "parameters"]]
    for r in results:
        rates = " ".join(figure(None if x is None else x.value) for x in r.n_alpha)
        gain = "" if r is results[0] else figure(r.percent_over(results[0]), 1)
        rows.append([r.name, figure(r.acceptance_length), gain, rates, str(r.examples), str(r.draft_vocab), str(r.parameters)])
    return table(rows)


__all__ = [
    "EAGLE",
    "EAGLE_3",
    "EXPERIMENTS",
    "Arm",
    "ArmResult",
    "Material",
    "Setting",
    "results_table",
    "run_arm",
    "run_experiment",
    "trained_head",
]
