"""Choices that a user makes: the recipe, the learning rate, the loss, how far to unroll, the size of the draft vocabulary, how candidates
are drafted when sampling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.bench.evaluate import acceptance_length, kept_and_cycles, n_alpha_intervals
from eagle3_jax.bench.plotting import GREY, bars, new_figure, save_png, tidy
from eagle3_jax.experiments.arms import Arm, ArmResult, decode, run_arm, trained_head
from eagle3_jax.experiments.material import Material
from eagle3_jax.experiments.paper import EAGLE_3, n_alpha_chart
from eagle3_jax.training.losses import ROW_LOSSES
from eagle3_jax.training.ttt import RECIPES

SAME_GRADIENT = "kl"
"""Differs from the cross-entropy by a constant: the same head."""
START = Arm("start", trained=False)
RATES = (0.25, 0.5, 2.0)
"""Factors on the setting's peak learning rate, beside 1."""
STEPS = (1, 2, 4)
PARTS = (8, 4, 2)
HEATS = (0.5, 1.0)
DRAFTINGS: dict[str, dict[str, Any]] = {
    "coupled (candidates see the noise)": {},
    "greedy candidates": {"coupled_draft": False},
    "sampled candidates, min(1, p/q)": {"rule": "rejection"},
}


def recipes(material: Material, out: Path) -> list[ArmResult]:
    """Every recipe by name, unrolled as far as the others: which tokens are scored, by what the sum is divided, which parts are trained."""
    others = [name for name in RECIPES if name != EAGLE_3.of]
    return compared(material, {EAGLE_3.of: EAGLE_3} | {name: Arm(f"recipe {name}", of=name) for name in others}, out, "which recipe?")


def rates(material: Material, out: Path) -> list[ArmResult]:
    """A quarter, half and double the peak learning rate, after the rate itself."""
    peak = material.setting.peak_lr
    arms = {f"{peak * factor:g}": Arm(f"rate {peak * factor:g}", peak_lr=peak * factor) for factor in RATES}
    arms = {f"{peak:g}": EAGLE_3} | arms
    return compared(material, arms, out, "which learning rate?", sorted(arms, key=float))


def losses(material: Material, out: Path) -> list[ArmResult]:
    """Every loss by name, all else as in EAGLE-3."""
    base = EAGLE_3.recipe(material.setting).loss
    others = [name for name in ROW_LOSSES if name not in (base, SAME_GRADIENT)]
    return compared(material, {base: EAGLE_3} | {name: Arm(f"loss {name}", loss=name) for name in others}, out, "which loss?")


def compared(material: Material, arms: dict[str, Arm], out: Path, question: str, order: Sequence[str] = ()) -> list[ArmResult]:
    """The arms as bars by these names, beside them what each gains over the first, prompt by prompt; last the head that they all start
    from, where there is one. order: of the bars, where it is not that of the arms."""
    results = {name: run_arm(material, arm) for name, arm in arms.items()}
    shown = list(order or arms)
    if material.from_head:
        results["start"] = run_arm(material, START)
        shown.append("start")
    base, first = next(iter(results.items()))
    labels = [name.replace("_", "\n") for name in shown]
    figure, axes = new_figure(max(8.0, 2.3 * len(results)), 3.8, columns=2)
    bars(axes[0, 0], labels, {"": [results[name].acceptance_length for name in shown]})
    axes[0, 0].set_ylim(bottom=1.0)
    tidy(axes[0, 0], f"Acceptance length: {question}", "", "tokens kept per cycle (T = 0)")
    bars(axes[0, 1], labels, {"": [results[name].percent_over(first) for name in shown]}, 1)
    axes[0, 1].axhline(0, color=GREY, lw=1)
    axes[0, 1].margins(y=0.12)
    tidy(axes[0, 1], f"Against {base}, prompt by prompt", "", "% more tokens kept per cycle")
    save_png(figure, out)
    return list(results.values())


def ttt_steps(material: Material, out: Path) -> list[ArmResult]:
    """J, the number of steps the head is unrolled in training."""
    shorter = [steps for steps in STEPS if steps < material.setting.ttt_steps]
    results = [*(run_arm(material, Arm(f"J = {steps}", steps=steps)) for steps in shorter), run_arm(material, EAGLE_3)]
    shown = [*results[:-1], ArmResult(**{**vars(results[-1]), "name": f"J = {material.setting.ttt_steps}"})]
    n_alpha_chart(shown, out, "How far must training unroll?")
    return results


def draft_vocab(material: Material, out: Path) -> list[ArmResult]:
    """Coverage against cost: the head's output matrix shrinks with the draft vocabulary, and so does what it can propose."""
    whole = material.setting.draft_vocab or material.target.config.vocab_size
    results = [run_arm(material, Arm(f"U = {whole // part}", draft_vocab=whole // part)) for part in PARTS]
    results.append(run_arm(material, EAGLE_3))
    groups = [str(result.draft_vocab) for result in results]
    figure, axes = new_figure(9.0, 3.6, columns=3)
    panels = (
        ("What is accepted", "acceptance length (T = 0)", [r.acceptance_length for r in results], 2),
        ("What it can say", "held-out tokens covered, %", [100 * r.coverage for r in results], 1),
        ("What it costs", "parameters of the head, thousands", [r.parameters / 1e3 for r in results], 0),
    )
    for axis, (title, ylabel, values, digits) in zip(axes[0], panels, strict=True):
        bars(axis, groups, {"": values}, digits)
        tidy(axis, title, "draft vocabulary, tokens", ylabel)
    save_png(figure, out)
    return results


def drafting(material: Material, out: Path) -> list[ArmResult]:
    """How candidates are chosen at T > 0, with one head and chains. The text is the target's in every case."""
    base = run_arm(material, EAGLE_3)
    head = trained_head(material, EAGLE_3)
    results = []
    for name, options in DRAFTINGS.items():
        for heat in HEATS:
            outputs, cycle = decode(material, head, temperature=heat, **options)
            changes = {
                "name": f"{name}, T = {heat:g}",
                "acceptance_length": acceptance_length(outputs),
                "by_prompt": kept_and_cycles(outputs),
                "n_alpha": n_alpha_intervals(outputs, material.setting.chain),
                "cycle_seconds": cycle,
            }
            results.append(ArmResult(**{**vars(base), **changes}))
    figure, axes = new_figure(7.2, 3.8)
    places = {name: results[i * len(HEATS) : (i + 1) * len(HEATS)] for i, name in enumerate(DRAFTINGS)}
    bars(axes[0, 0], [f"T = {heat:g}" for heat in HEATS], {name: [r.acceptance_length for r in found] for name, found in places.items()})
    tidy(axes[0, 0], "Acceptance length: what should a chain propose when the target samples?", "", "tokens kept per cycle")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    save_png(figure, out)
    return results
