"""A benchmark's pictures: speed-up and acceptance by set, n-alpha, throughput against the batch, where a cycle's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle3_jax.bench.benchmark import PLAIN, ModeResult
from eagle3_jax.bench.phases import Phases, shares
from eagle3_jax.bench.plotting import COLOURS, GREY, bars, lines, new_figure, save_png, tidy
from eagle3_jax.bench.throughput import Throughput, modes_in


def sets_chart(sets: Mapping[str, Sequence[ModeResult]], out: Path, note: str = "") -> Path:
    """Speed-up and acceptance length of every mode, by set."""
    modes = [mode.mode for mode in next(iter(sets.values())) if mode.mode != PLAIN]
    by_mode = {name: [next(m for m in found if m.mode == name) for found in sets.values()] for name in modes}
    figure, axes = new_figure(max(7.0, 1.3 * len(sets) * max(2, len(modes)) / 2 + 2.0), 6.0, rows=2)
    bars(axes[0, 0], list(sets), {name: [m.speed_up for m in found] for name, found in by_mode.items()})
    axes[0, 0].axhline(1.0, color=GREY, lw=1, ls="--")
    tidy(axes[0, 0], f"Speed-up over plain decoding{note}", "", "times plain tokens/s")
    bars(axes[1, 0], list(sets), {name: [m.acceptance_length for m in found] for name, found in by_mode.items()})
    tidy(axes[1, 0], "Acceptance length", "", "tokens per cycle")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return save_png(figure, out)


def n_alpha_chart(sets: Mapping[str, Sequence[ModeResult]], out: Path, note: str = "") -> Path | None:
    """n-alpha of the longest chain, a line per set; None when no chain was measured."""
    chains = [mode for mode in next(iter(sets.values())) if mode.is_chain]
    if not chains:
        return None
    name = max(chains, key=lambda mode: len(mode.n_alpha)).mode
    found = {label: next(mode for mode in modes if mode.mode == name) for label, modes in sets.items()}
    figure, axes = new_figure(7.0, 4.0)
    lines(axes[0, 0], {label: list(enumerate(mode.n_alpha_intervals)) for label, mode in found.items()})
    axes[0, 0].set_ylim(0, 1)
    tidy(
        axes[0, 0],
        f"Acceptance along a chain, {name}{note}",
        "n, accepted drafts before this one",
        "n-alpha, rate of acceptance",
    )
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return save_png(figure, out)


def throughput_chart(found: Sequence[Throughput], out: Path, note: str = "") -> Path:
    """Tokens per second and, where something was drafted, speed-up against the batch."""
    modes = modes_in(found)
    figure, axes = new_figure(9.0 if modes else 4.8, 3.8, columns=2 if modes else 1)
    lines(axes[0, 0], {m: [(t.batch, t.tokens_per_second) for t in found if t.mode == m] for m in (PLAIN, *modes)}, positions_on_log2=True)
    tidy(axes[0, 0], f"Throughput{note}", "batch, rows decoded together", "tokens/s of all rows")
    if not modes:
        return save_png(figure, out)
    axes[0, 0].legend(frameon=False, fontsize=9)
    gains = {m: [(t.batch, t.speed_up) for t in found if t.mode == m] for m in modes}
    lines(axes[0, 1], gains, positions_on_log2=True, styles=range(1, len(modes) + 1))  # a mode's colour is the same in both panels
    axes[0, 1].axhline(1.0, color=GREY, lw=1, ls="--")
    tidy(axes[0, 1], "Gain of speculation", "batch, rows decoded together", "times plain tokens/s")
    return save_png(figure, out)


def phases_chart(found: Sequence[Phases], out: Path, note: str = "") -> Path:
    """A stacked bar per way of decoding, milliseconds."""
    figure, axes = new_figure(max(5.0, 1.2 * len(found) + 2.4), 3.8)
    below = [0.0] * len(found)
    for colour, (part, values) in zip(COLOURS, shares(found).items(), strict=False):
        axes[0, 0].bar(range(len(found)), values, 0.6, bottom=below, color=colour, label=part)
        below = [a + b for a, b in zip(below, values, strict=True)]
    for x, (top, p) in enumerate(zip(below, found, strict=True)):
        axes[0, 0].annotate(f"{1e3 * p.whole:.3g}", (x, top), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes[0, 0].set_xticks(range(len(found)), [p.mode for p in found])
    tidy(axes[0, 0], f"Where a cycle's time goes{note}", "", "milliseconds per cycle")
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    return save_png(figure, out)
