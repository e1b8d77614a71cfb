"""Pictures of drafted trees with the path that was kept: text for a terminal, PNG through matplotlib."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from eagle3_jax.bench.evaluate import accepted_path
from eagle3_jax.bench.plotting import new_figure, save_png
from eagle3_jax.decoding.generate import Output

Decode = Callable[[int], str]


@dataclasses.dataclass(frozen=True)
class CycleTree:
    """One drafted tree. tokens, parents: per node, node 0 the token before the drafts. path: kept nodes, from node 0.

    own: the token that the target added itself at the path's end; None when the answer ended on a drafted one.
    """

    number: int
    tokens: list[int]
    parents: list[int]
    path: list[int]
    own: int | None

    @property
    def kept(self) -> int:
        """Tokens that the cycle added to the text."""
        return len(self.path) - 1 + (self.own is not None)


@dataclasses.dataclass(frozen=True)
class Style:
    """Marks and branches of a text drawing, and escape sequences around a node of each kind."""

    kept: str
    refused: str
    own: str
    branch: str
    last: str
    through: str
    colours: tuple[str, str, str] = ("", "", "")


UNICODE = Style("●", "○", "✚", "├─", "└─", "│ ")
ASCII = Style("*", "o", "+", "|-", "`-", "| ")
COLOUR = dataclasses.replace(UNICODE, colours=("\x1b[1;32m", "\x1b[2m", "\x1b[1;33m"))
RESET = "\x1b[0m"


def cycle_trees(output: Output, row: int = 0) -> list[CycleTree]:
    """The trees of one row's cycles. Raises ValueError when they were not recorded (`record_trees=True`)."""
    if output.trees is None:
        raise ValueError("the output holds no trees; generate with record_trees=True")
    trees = []
    end = 1
    for number, (kept, (tokens, parents)) in enumerate(zip(output.accept_lengths[row], output.trees[row], strict=True)):
        new = output.tokens[row][end : end + kept]
        end += kept
        path = accepted_path(tokens, parents, new)
        trees.append(CycleTree(number + 1, list(tokens), list(parents), path, new[-1] if len(path) <= len(new) else None))
    return trees


def tree_text(tree: CycleTree, decode: Decode = str, style: Style = UNICODE) -> str:
    """The tree as lines: a node under its parent, kept ones marked, the target's own token where it continued. `decode`: id to text."""
    drafted = len(tree.tokens) - 1
    lines = [f"cycle {tree.number}: {tree.kept} token{'s' if tree.kept != 1 else ''} kept, {len(tree.path) - 1} of {drafted} drafted"]
    children = _children(tree)
    on_path = set(tree.path)

    def node(mark: str, colour: str, token: int) -> str:
        return f"{colour}{mark} {quote(decode(token), token)}{RESET if colour else ''}"

    def walk(at: int, indent: str) -> None:
        below: list[int | None] = list(children[at])
        if tree.own is not None and at == tree.path[-1]:
            below.append(None)
        for place, child in enumerate(below):
            final = place == len(below) - 1
            lead = indent + (style.last if final else style.branch)
            if child is None:
                assert tree.own is not None
                lines.append(lead + node(style.own, style.colours[2], tree.own))
                continue
            stands = child in on_path
            lines.append(lead + node(style.kept if stands else style.refused, style.colours[0 if stands else 1], tree.tokens[child]))
            walk(child, indent + ("  " if final else style.through))

    lines.append(node(style.kept, style.colours[0], tree.tokens[0]))
    walk(0, "")
    return "\n".join(lines)


def legend(style: Style = UNICODE) -> str:
    """What the marks mean."""
    return f"{style.kept} kept   {style.refused} drafted, not kept   {style.own} the target's own token"


def quote(text: str, token: int) -> str:
    """A token's text on one line in quotes; with its id when it is only part of a character."""
    shown = json.dumps(text, ensure_ascii=False)
    return f"{shown}#{token}" if "\ufffd" in text or not text else shown


def save_trees_png(path: str | os.PathLike[str], trees: Sequence[CycleTree], decode: Decode = str, title: str = "") -> None:
    """Draws the trees below one another, depth to the right, the kept path thick and green. Written whole or not at all.

    Raises ValueError without a tree, ImportError naming the extra without matplotlib, OSError for a path that cannot be written.
    """
    if not trees:
        raise ValueError("no tree to draw: no cycle ran")
    places = [_places(tree) for tree in trees]
    heights = [max(y for _, y in spots.values()) + 1 for spots in places]
    widths = [max(x for x, _ in spots.values()) for spots in places]
    columns = max(widths)
    size = (max(6.5, 1.55 * columns + 2.2), 0.3 * sum(heights) + 0.75 * len(trees) + 0.9)
    figure, grid = new_figure(*size, rows=len(trees), gridspec_kw={"height_ratios": [h + 1.2 for h in heights]})
    axes = grid[:, 0]
    for axis, tree, spots, height in zip(axes, trees, places, heights, strict=True):
        _draw(axis, tree, spots, decode)
        axis.set_xlim(-0.15, columns + 0.95)
        axis.set_ylim(height - 0.4, -0.6)
    axes[-1].set_xlabel("depth in the draft tree (tokens after the last committed one)")
    figure.suptitle(title or "Draft trees and the path that the target kept", fontsize=11)
    from matplotlib.patches import Patch  # pyright: ignore[reportMissingImports]

    marks = (("kept", KEPT_COLOUR), ("drafted, not kept", "#f1f2f4"), ("the target's own token", OWN_COLOUR))
    handles = [Patch(facecolor=colour, edgecolor=REFUSED_COLOUR, label=label) for label, colour in marks]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save_png(figure, path)


KEPT_COLOUR, REFUSED_COLOUR, OWN_COLOUR = "#1b7f3b", "#8a8f98", "#c46a00"


def _draw(axis: Any, tree: CycleTree, spots: dict[int, tuple[float, float]], decode: Decode) -> None:
    """One tree on matplotlib axes; node -1 is the target's own token."""
    on_path = set(tree.path)
    parents = {m: tree.parents[m] for m in range(1, len(tree.tokens))}
    if tree.own is not None:
        parents[-1] = tree.path[-1]
    for m, parent in parents.items():
        (x0, y0), (x1, y1) = spots[parent], spots[m]
        colour, width, dash = _edge(m, on_path)
        # Down just before the child, so that edges do not run through labels.
        turn = x1 - 0.1
        axis.plot([x0, turn, turn, x1], [y0, y0, y1, y1], color=colour, lw=width, ls=dash, zorder=2 if width > 1 else 1)
    for m, (x, y) in spots.items():
        token = tree.own if m == -1 else tree.tokens[m]
        assert token is not None
        colour = _edge(m, on_path)[0]
        label = quote(decode(token), token)
        strong = m == -1 or m in on_path
        axis.text(
            x,
            y,
            label if len(label) <= 18 else label[:16] + '…"',
            ha="left",
            va="center",
            fontsize=8.5,
            color="white" if strong else "#30343a",
            fontweight="bold" if strong else "normal",
            zorder=3,
            bbox={"boxstyle": "round,pad=0.25", "fc": colour if strong else "#f1f2f4", "ec": colour, "lw": 0.8},
            parse_math=False,
        )
    drafted = len(tree.tokens) - 1
    axis.set_title(f"cycle {tree.number}: {tree.kept} kept, {len(tree.path) - 1} of {drafted} drafted", fontsize=9.5, loc="left")
    axis.set_yticks([])
    axis.xaxis.get_major_locator().set_params(integer=True)
    for side in ("top", "left", "right"):
        axis.spines[side].set_visible(False)


def _edge(m: int, on_path: set[int]) -> tuple[str, float, str]:
    if m == -1:
        return OWN_COLOUR, 1.8, "--"
    return (KEPT_COLOUR, 2.2, "-") if m in on_path else (REFUSED_COLOUR, 0.8, "-")


def _children(tree: CycleTree) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in tree.tokens]
    for m in range(1, len(tree.tokens)):
        children[tree.parents[m]].append(m)
    return children


def _places(tree: CycleTree) -> dict[int, tuple[float, float]]:
    """(depth, line) of every node: leaves take a line each, a parent stands on its first child's line; -1 is the target's own token."""
    children = _children(tree)
    if tree.own is not None:
        children[tree.path[-1]].append(-1)
    spots: dict[int, tuple[float, float]] = {}
    lines = 0

    def place(m: int, depth: int) -> float:
        nonlocal lines
        below = [] if m == -1 else children[m]
        ys = [place(child, depth + 1) for child in below]
        if not ys:
            ys = [float(lines)]
            lines += 1
        spots[m] = (float(depth), ys[0])
        return ys[0]

    place(0, 0)
    return spots
