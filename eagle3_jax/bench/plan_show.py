"""A plan for people: the candidates as a table, and the tuning table over depth, width and nodes as text and as PNG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from eagle3_jax.bench.plotting import new_figure, save_png
from eagle3_jax.bench.tables import figure
from eagle3_jax.terminal import duration, table
from eagle3_jax.tuning.costs import Costs
from eagle3_jax.tuning.plan import Candidate, Plan, best_by_size


def candidates_table(plan: Plan, most: int = 12) -> str:
    """The fastest candidates and plain decoding, a line each, the chosen one marked."""
    shown = [c for i, c in enumerate(plan.candidates) if i < most or c.tree is None or c == plan.chosen]
    rows = [["", "acceptance length", "cycle", "cost", "speed-up", ""]]
    for c in shown:
        mark = "<- chosen" if c == plan.chosen else ""
        rows.append([c.name, figure(c.acceptance_length), duration(c.cycle_seconds), figure(c.cost), figure(c.speed_up), mark])
    return table(rows)


def passes_table(costs: Costs) -> str:
    """What was measured: milliseconds of a pass by its width."""
    lines = []
    for kind, title in (("target", "target pass"), ("extend", "draft catch-up"), ("expand", "draft level")):
        cells = ", ".join(f"{width}: {duration(seconds)}" for width, seconds in sorted(getattr(costs, kind).items()))
        lines.append(f"{title:14s} {cells}")
    return "\n".join(lines)


def tuning_table(plan: Plan) -> str:
    """Speed-up of every size: chains on one line, then a block per width with depths down and nodes across."""
    cells = best_by_size(plan)
    chains = [cells[key] for key in sorted(cells) if key[1] == 1]
    blocks = []
    if chains:
        blocks.append(table([["chain of", *(str(c.tree.depth) for c in chains if c.tree)], ["", *(figure(c.speed_up) for c in chains)]]))
    for width, grid in _grids(cells):
        depths, nodes = _axes(grid)
        rows = [[f"width {width}", *(f"{n} nodes" if i == 0 else str(n) for i, n in enumerate(nodes))]]
        for depth in depths:
            rows.append([f"  depth {depth}", *(figure(grid[depth, n].speed_up) if (depth, n) in grid else "" for n in nodes)])
        blocks.append(table(rows))
    return "\n\n".join(blocks)


def save_tuning_png(path: str | os.PathLike[str], plan: Plan, title: str) -> None:
    """The tuning table as a picture, one panel per width; blue is faster than plain decoding, red slower; the best tree is framed.

    Written whole or not at all. Raises ImportError naming the extra when matplotlib is missing.
    """
    cells = best_by_size(plan)
    chains = {(key[0], key[0] + 1): c for key, c in cells.items() if key[1] == 1}
    panels: list[tuple[str, dict[tuple[int, int], Candidate]]] = [("chains", chains)] if chains else []
    panels += [(f"width {width}", grid) for width, grid in _grids(cells)]
    values = [c.speed_up for c in cells.values()]
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    drawing, grids = new_figure(3.6 * columns + 1.0, 3.1 * lines + 0.9, rows=lines, columns=columns)
    from matplotlib.colors import TwoSlopeNorm  # pyright: ignore[reportMissingImports]
    from matplotlib.patches import Rectangle  # pyright: ignore[reportMissingImports]

    axes = grids.ravel()
    norm = TwoSlopeNorm(1.0, min(min(values), 0.95), max(max(values), 1.05))
    image: Any = None
    for axis, (name, grid) in zip(axes, panels, strict=False):
        depths, nodes = _axes(grid)
        field = [[grid[d, n].speed_up if (d, n) in grid else float("nan") for n in nodes] for d in depths]
        image = axis.imshow(field, norm=norm, cmap="RdBu", aspect="auto", origin="lower")
        axis.set_title(name, fontsize=10)
        axis.set_xticks(range(len(nodes)), [str(n) for n in nodes], fontsize=8)
        axis.set_yticks(range(len(depths)), [str(d) for d in depths], fontsize=8)
        axis.set_xlabel("nodes", fontsize=8)
        axis.set_ylabel("depth", fontsize=8)
        for i, d in enumerate(depths):
            for j, n in enumerate(nodes):
                if (d, n) not in grid:
                    continue
                axis.text(j, i, f"{grid[d, n].speed_up:.2f}", ha="center", va="center", fontsize=7)
                if grid[d, n] == plan.best_tree:
                    axis.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, ec="black", lw=2))
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    bar = drawing.colorbar(image, ax=list(axes), shrink=0.8)
    bar.set_label("predicted speed-up over plain decoding", fontsize=9)
    drawing.suptitle(title, fontsize=11)
    save_png(drawing, path)


def _grids(cells: dict[tuple[int, int, int], Candidate]) -> list[tuple[int, dict[tuple[int, int], Candidate]]]:
    """Per width above 1: (depth, nodes) -> candidate."""
    widths = sorted({width for _, width, _ in cells if width > 1})
    return [(width, {(d, n): c for (d, w, n), c in cells.items() if w == width}) for width in widths]


def _axes(grid: dict[tuple[int, int], Candidate]) -> tuple[Sequence[int], Sequence[int]]:
    return sorted({d for d, _ in grid}), sorted({n for _, n in grid})
