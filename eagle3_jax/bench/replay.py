"""Acceptance of every smaller tree from one recorded run with a large one.

The text does not depend on the tree, so what a smaller tree would have kept of a cycle is known: the recorded scores say which
nodes it would have drafted, the text says which of them are right. Two approximations: the cycles of the recorded run do not start
at quite the same tokens as those of a smaller tree would, and a narrow tree's candidates that the recorded one had dropped count as
wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle3_jax.bench.evaluate import accepted_path
from eagle3_jax.decoding.generate import Output
from eagle3_jax.drafting import Draft
from eagle3_jax.tree import Tree
from eagle3_jax.tree_names import tree_name
from eagle3_jax.tuning.survival import Survival, candidates

RECORDED = Tree.official()
"""What a run that is to be replayed drafts: the official size."""


def largest_tree(draft: Draft) -> Tree:
    """`RECORDED`, or as wide a tree as a small draft vocabulary allows."""
    width = min(RECORDED.width, int(draft.target_ids.shape[0]))
    room = 1 + width + (RECORDED.depth - 1) * width**2
    return Tree(min(RECORDED.nodes, room), RECORDED.depth, width)


def replay(outputs: Sequence[Output], recorded: Tree, source: str, sizes: Sequence[Tree] | None = None) -> Survival:
    """Counts over all rows and cycles of runs that recorded their trees (`record_trees=True`).

    A cycle with fewer tokens after it than the tree is deep says nothing certain and is left out, whatever it kept.
    Raises ValueError when the outputs hold no trees, or no cycle that counts.
    """
    fits = [s for s in (candidates() if sizes is None else sizes) if s.width <= recorded.width and s.depth <= recorded.depth]
    shapes = [s for s in fits if s.nodes <= recorded.nodes]
    stood = {tree_name(shape): [0] * shape.depth for shape in shapes}
    cycles = 0
    for output in outputs:
        if output.trees is None or output.scores is None:
            raise ValueError("the output holds no trees; generate with record_trees=True")
        for row, lengths in enumerate(output.accept_lengths):
            end = 1
            for cycle, kept in enumerate(lengths):
                text = output.tokens[row][end : end + recorded.depth + 1]
                end += kept
                if len(text) <= recorded.depth:
                    continue
                cycles += 1
                tokens, parents = output.trees[row][cycle]
                path = accepted_path(tokens, parents, text)[1:]
                children = _children(parents)
                for shape in shapes if path else ():
                    nodes = drafted(children, output.scores[row][cycle], shape)
                    counts = stood[tree_name(shape)]
                    for depth, node in enumerate(path[: shape.depth]):
                        if node not in nodes:
                            break
                        counts[depth] += 1
    if not cycles:
        raise ValueError(f"no cycle to count: answers must be longer than the {recorded.depth} levels of the recorded tree")
    return Survival(cycles, {name: tuple(counts) for name, counts in stood.items()}, source)


def drafted(children: Sequence[Sequence[int]], scores: Sequence[float], shape: Tree) -> set[int]:
    """The nodes of a recorded tree that a tree of this size would have held: grown level by level as `drafting.grow` does."""
    frontier = list(children[0][: shape.width])
    pool = list(frontier)
    for _ in range(shape.depth - 1):
        found = [child for node in frontier for child in children[node][: shape.width]]
        pool += found
        frontier = sorted(found, key=lambda node: -scores[node])[: shape.width]
    return set(sorted(pool, key=lambda node: -scores[node])[: shape.nodes - 1])


def _children(parents: Sequence[int]) -> list[list[int]]:
    """Per node its children, best first: a pool lists them so."""
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        children[parents[node]].append(node)
    return children
