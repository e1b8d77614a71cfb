"""The paper's own experiments: n-alpha (figures 4 and 7), the ablation (Table 2), the scaling of data (Figure 1).

What is compared is EAGLE's way of training and EAGLE-3's on ONE architecture, EAGLE-3's decoder layer: the differences are the
feature that is read, the loss, and the unrolling, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.bench.plotting import bars, lines, new_figure, save_png, tidy
from eagle3_jax.experiments.arms import Arm, ArmResult, run_arm
from eagle3_jax.experiments.material import Material

EAGLE = Arm("EAGLE", top=True, steps=1, feature_loss=True)
UNTIED = Arm("top feature, no feature loss, no TTT", top=True, steps=1)
TOP_TTT = Arm("top feature, TTT", top=True)
EAGLE_3 = Arm("EAGLE-3")
FRACTIONS = (0.125, 0.25, 0.5, 1.0)
STAGES = ("EAGLE", "+ TTT, no\nfeature loss", "+ fusion\n(EAGLE-3)")


def n_alpha(material: Material, out: Path) -> list[ArmResult]:
    """Figures 4 and 7: without the feature loss the head feeds back what it likes; only training-time test teaches it to read that."""
    results = [run_arm(material, arm) for arm in (EAGLE, UNTIED, EAGLE_3)]
    n_alpha_chart(results, out, "Does acceptance last as the head reads its own states?")
    return results


def ablation(material: Material, out: Path) -> list[ArmResult]:
    """Table 2: from EAGLE, the feature loss goes and training-time test comes, then three layers are fused."""
    results = [run_arm(material, arm) for arm in (EAGLE, TOP_TTT, EAGLE_3)]
    length_chart(results, out, "Acceptance length: what each change is worth", STAGES)
    return results


def scaling(material: Material, out: Path) -> list[ArmResult]:
    """Figure 1: the same number of updates on growing shares of the training text."""
    results = [run_arm(material, scaled(base, share)) for base in (EAGLE, EAGLE_3) for share in FRACTIONS]
    figure, axes = new_figure(6.4, 3.8)
    scaling_panel(axes[0, 0], results, "Acceptance length: does more data help?")
    save_png(figure, out)
    return results


def overview(material: Material, out: Path) -> list[ArmResult]:
    """All three in one picture: does training-time test matter, does fusion, does data?"""
    lasting = [run_arm(material, arm) for arm in (EAGLE, UNTIED, EAGLE_3)]
    stages = [run_arm(material, arm) for arm in (EAGLE, TOP_TTT, EAGLE_3)]
    shares = [run_arm(material, scaled(base, share)) for base in (EAGLE, EAGLE_3) for share in FRACTIONS]
    figure, axes = new_figure(13.0, 4.2, columns=3, width_ratios=[1.25, 1.0, 1.0])
    n_alpha_panel(axes[0, 0], lasting, "Acceptance along the chain")
    axes[0, 0].legend(frameon=False, fontsize=8.5, loc="lower right", bbox_to_anchor=(1.0, 0.12))
    length_panel(axes[0, 1], stages, "Acceptance length, step by step", STAGES)
    scaling_panel(axes[0, 2], shares, "Acceptance length against data")
    save_png(figure, out)
    return list({result.name: result for result in (*lasting, *stages, *shares)}.values())


def n_alpha_chart(results: Sequence[ArmResult], out: Path, title: str) -> None:
    """n-alpha of every arm against n."""
    figure, axes = new_figure(7.2, 4.0)
    n_alpha_panel(axes[0, 0], results, title)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save_png(figure, out)


def n_alpha_panel(axis: Any, results: Sequence[ArmResult], title: str) -> None:
    lines(axis, {result.name: list(enumerate(result.n_alpha)) for result in results})
    axis.set_ylim(0, 1)
    tidy(axis, title, "n, accepted drafts before this one in the chain", "n-alpha, rate of acceptance (T = 0)")


def length_chart(results: Sequence[ArmResult], out: Path, title: str, labels: Sequence[str]) -> None:
    """Acceptance length of every arm as a bar."""
    figure, axes = new_figure(max(5.0, 1.4 * len(results) + 1.2), 3.8)
    length_panel(axes[0, 0], results, title, labels)
    save_png(figure, out)


def length_panel(axis: Any, results: Sequence[ArmResult], title: str, labels: Sequence[str]) -> None:
    bars(axis, labels, {"": [result.acceptance_length for result in results]})
    tidy(axis, title, "", "tokens kept per cycle (T = 0)")


def scaling_panel(axis: Any, results: Sequence[ArmResult], title: str) -> None:
    """A line for each of the two ways, `results` holding first EAGLE's shares, then EAGLE-3's."""
    half = len(results) // 2
    series = {base.name: found for base, found in ((EAGLE, results[:half]), (EAGLE_3, results[half:]))}
    points = {name: [(r.examples, r.acceptance_length) for r in found] for name, found in series.items()}
    lines(axis, points, positions_on_log2=True, styles=(0, 2))  # the colours they have in the other pictures
    axis.set_ylim(bottom=1.0)
    tidy(axis, title, "training texts (as many updates for each)", "tokens kept per cycle (T = 0)")
    axis.legend(frameon=False, fontsize=9)


def scaled(arm: Arm, share: float) -> Arm:
    """The arm on a share of the data; the whole is the arm itself, so that it is trained once."""
    if share == 1.0:
        return arm
    return Arm(**{**vars(arm), "name": f"{arm.name} 1/{round(1 / share)}", "data": share})
