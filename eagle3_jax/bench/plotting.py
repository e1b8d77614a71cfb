"""Pictures through matplotlib without its global state: one look, figures written whole or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.bench.evaluate import Interval
from eagle3_jax.whole_file import whole_file

COLOURS = ("#1b7f3b", "#c46a00", "#2b5fa8", "#9b2d5c", "#5b5f66", "#7a5cc2", "#0f8a94", "#a08300")
MARKS = "osD^vPXh"
GREY = "#8a8f98"

Point = Interval | float | None


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **layout: Any) -> tuple[Any, Any]:
    """(figure, axes [rows, columns]) in inches. Raises ImportError naming the extra where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("a PNG needs matplotlib; install it with: pip install 'eagle3-jax[plots]'") from None
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **layout)


def save_png(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Writes the figure under a temporary name, then renames it. Raises OSError for a path that cannot be written."""
    with whole_file(Path(path)) as part, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # drawn as an empty box
        figure.savefig(part, format="png")
    return Path(path)


def tidy(axis: Any, title: str = "", xlabel: str = "", ylabel: str = "") -> None:
    """Labels, a light grid, no frame on the upper and right side."""
    axis.set_title(title, fontsize=10.5, loc="left")
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.grid(axis="y", color="#e4e6ea", lw=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def lines(
    axis: Any, series: Mapping[str, Sequence[tuple[float, Point]]], positions_on_log2: bool = False, styles: Sequence[int] | None = None
) -> None:
    """One line with interval bars per name; points that are None are left out. styles: places in the row of colours and marks."""
    for i, (name, points) in zip(styles or range(len(series)), series.items(), strict=True):
        drawn = [(x, y) for x, y in points if y is not None]
        axis.errorbar(
            [x for x, _ in drawn],
            [value_of(y) for _, y in drawn],
            yerr=_bars([y for _, y in drawn]),
            label=name,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKS[i % len(MARKS)],
            ms=5,
            lw=1.8,
            capsize=2.5,
            elinewidth=1,
        )
    xs = sorted({x for points in series.values() for x, _ in points})
    if positions_on_log2:
        axis.set_xscale("log", base=2)
        axis.minorticks_off()
    axis.set_xticks(xs, [f"{x:g}" for x in xs])


def bars(axis: Any, groups: Sequence[str], series: Mapping[str, Sequence[Point]], digits: int = 2) -> None:
    """A bar with its interval and value per group and name; names stand beside each other within a group, values at the bars' ends."""
    width = 0.8 / max(1, len(series))
    for i, (name, points) in enumerate(series.items()):
        at = [g + (i - (len(series) - 1) / 2) * width for g in range(len(groups))]
        heights = [value_of(y) if y is not None else 0.0 for y in points]
        colour = COLOURS[i % len(COLOURS)]
        spread = _bars(points) if any(isinstance(y, Interval) for y in points) else None
        axis.bar(at, heights, 0.92 * width, color=colour, label=name, yerr=spread, capsize=2.5, error_kw={"elinewidth": 1})
        for x, y in zip(at, points, strict=True):
            if y is not None:
                below = value_of(y) < 0
                end = (y.low if below else y.high) if isinstance(y, Interval) else None
                place = {"xytext": (0, -2 if below else 2), "textcoords": "offset points", "va": "top" if below else "bottom"}
                at_end = (x, value_of(y) if end is None else end)
                axis.annotate(f"{value_of(y):.{digits}f}", at_end, **place, ha="center", fontsize=8)
    axis.set_xticks(range(len(groups)), groups)


def value_of(point: Interval | float) -> float:
    return point.value if isinstance(point, Interval) else point


def _bars(points: Sequence[Point]) -> list[list[float]]:
    """[below, above] of every point, zero where there is no interval."""
    below, above = [], []
    for y in points:
        low = high = value = 0.0
        if isinstance(y, Interval):
            value = y.value
            low, high = (value if end is None else end for end in (y.low, y.high))
        below.append(max(0.0, value - low))
        above.append(max(0.0, high - value))
    return [below, above]
