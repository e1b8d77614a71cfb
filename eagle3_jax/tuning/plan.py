"""Which tree pays on this machine: what passes cost, times what the head's drafts survive, down to plain decoding.

speed-up of a tree = acceptance length x plain step / cycle. It is a prediction for decoding after the prompt's pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eagle3_jax.tree import Chain, Tree
from eagle3_jax.tree_names import tree_name
from eagle3_jax.tuning.costs import Costs
from eagle3_jax.tuning.survival import Survival, candidates

MARGIN = 0.05
"""A tree must promise this much more than plain decoding: predictions are off by a few percent."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way of decoding and what it promises. tree: None is plain. cost: the cycle in steps of plain decoding."""

    tree: Tree | None
    acceptance_length: float
    cycle_seconds: float
    cost: float

    @property
    def name(self) -> str:
        return tree_name(self.tree)

    @property
    def speed_up(self) -> float:
        """Over plain decoding, after the first token."""
        return self.acceptance_length / self.cost


@dataclasses.dataclass(frozen=True)
class Plan:
    """candidates: the fastest first, plain decoding among them. chosen: the one to use."""

    candidates: tuple[Candidate, ...]
    chosen: Candidate

    @property
    def best_tree(self) -> Candidate:
        """The fastest that drafts, whether it pays or not."""
        return next(c for c in self.candidates if c.tree is not None)


def make_plan(costs: Costs, survival: Survival, *, shift: float = 0.0, widest: int | None = None, margin: float = MARGIN) -> Plan:
    """Weighs every size that `survival` knows and that a draft of `widest` candidates can fill (1: chains only).

    shift: of the head's acceptance, see `survival`. The fastest tree is chosen when it promises at least `margin` over plain decoding.
    """
    plain = Candidate(None, 1.0, costs.plain, 1.0)
    found = [plain]
    for tree in known_sizes(survival):
        if widest is None or tree.width <= widest:
            cycle = costs.cycle(tree)
            found.append(Candidate(tree, survival.length(tree_name(tree), shift), cycle, cycle / costs.plain))
    found.sort(key=lambda c: -c.speed_up)
    best = next((c for c in found if c.tree is not None and c.speed_up >= 1 + margin), plain)
    return Plan(tuple(found), best)


def staying(plan: Plan, before: Tree | None, margin: float = MARGIN) -> Plan:
    """The plan with the tree chosen `before`, if that still pays and the plan's choice is not faster by `margin`; None: there was none."""
    now = next((c for c in plan.candidates if c.tree is not None and c.tree == before), None)
    if now is None or now.speed_up < 1 or plan.chosen.speed_up > now.speed_up * (1 + margin):
        return plan
    return dataclasses.replace(plan, chosen=now)


def known_sizes(survival: Survival) -> list[Tree]:
    """The candidates whose survival was counted."""
    return [tree for tree in candidates() if tree_name(tree) in survival.stood]


def default_tree(backend: str, widest: int | None = None) -> Chain | Tree:
    """A size for a machine on which nothing was measured: passes get dearer with every node on a CPU, hardly on an accelerator."""
    if backend == "cpu":
        return Chain(2)
    return Tree(nodes=60, depth=8, width=10) if widest is None or widest >= 10 else Chain(5)


def best_by_size(plan: Plan) -> dict[tuple[int, int, int], Candidate]:
    """(depth, width, nodes) -> candidate, plain decoding left out: the tuning table's cells."""
    return {(c.tree.depth, c.tree.width, c.tree.nodes): c for c in plan.candidates if c.tree is not None}


def break_even(candidates: Sequence[Candidate]) -> float | None:
    """The lowest acceptance length at which one of these trees is as fast as plain decoding: the cheapest cycle's cost."""
    costs = [c.cost for c in candidates if c.tree is not None]
    return min(costs) if costs else None
