"""Names of draft trees for people: "plain", "chain:3", "tree:16,4,4" (nodes, depth, width)."""

from __future__ import annotations

from typing import Literal

from eagle3_jax.tree import Chain, Tree

SYNTAX = '"auto", "chain:LENGTH" or "tree:NODES,DEPTH,WIDTH"'


def parse_tree(text: str) -> Chain | Tree | Literal["auto"]:
    """The tree that `text` names; "auto" is itself. Raises ValueError naming the text and the syntax."""
    kind, _, rest = text.strip().partition(":")
    if kind == "auto" and not rest:
        return "auto"
    try:
        sizes = [int(part) for part in rest.split(",")]
    except ValueError:
        sizes = []
    if kind == "chain" and len(sizes) == 1:
        return Chain(sizes[0])
    if kind == "tree" and len(sizes) == 3:
        return Tree(*sizes)
    raise ValueError(f"tree {text!r} is not understood; write {SYNTAX}, for example chain:3 or tree:16,4,4")


def tree_name(tree: Chain | Tree | None) -> str:
    """The text that `parse_tree` reads back; a tree of width 1 that is a chain is called one; None is "plain", no drafting."""
    if tree is None:
        return "plain"
    shape = tree.tree
    if shape == Chain(shape.depth).tree:
        return f"chain:{shape.depth}"
    return f"tree:{shape.nodes},{shape.depth},{shape.width}"
