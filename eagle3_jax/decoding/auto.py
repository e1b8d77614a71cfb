"""tree="auto": the size that pays on this machine, kept for the next time and corrected while it is used.

The first call with "auto" for a target, head and batch size measures the machine (`costs`), takes what is known of the head's
acceptance (`survival`), chooses (`plan`) and stores the figures (`plan_store`). Every call then reports what it accepted, which
shifts the estimate for all sizes; when nothing pays any more, decoding falls back to plain. Plain decoding observes nothing, so
the shift fades with every plain call, and drafting gets another chance after some dozens of them.
tree=None uses a stored choice and never measures.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from eagle3_jax.drafting import Draft
from eagle3_jax.target import Target
from eagle3_jax.tree import Chain, Tree
from eagle3_jax.tree_names import tree_name
from eagle3_jax.tuning import plan_store
from eagle3_jax.tuning.costs import measure
from eagle3_jax.tuning.plan import Plan, default_tree, make_plan, staying
from eagle3_jax.tuning.plan_store import Stored
from eagle3_jax.tuning.survival import Survival, attached, typical_survival

KNOWN, GUESSED = 128.0, 8.0
"""Cycles that the stored acceptance weighs against observed ones: counted for this head, or a typical head's."""
MEMORY = 512.0
"""Cycles that observations weigh at most: older ones fade."""
FADING = 0.97
"""What remains of a shift after a plain call."""


class AutoTree:
    """The choice for one target, draft and batch size, and the shift of acceptance observed since it was made."""

    def __init__(self, stored: Stored, widest: int):
        self.stored, self.widest = stored, widest
        self.counted = stored.survival is not None
        self.survival = stored.survival if stored.survival is not None else typical_survival()
        self.shift, self.weight = 0.0, KNOWN if self.counted else GUESSED
        self._plans: dict[tuple[float, bool], Plan] = {}
        self._chosen: dict[bool, Tree | None] = {}

    def plan(self, chains_only: bool = False) -> Plan:
        """All candidates at the present estimate, weighed anew when that has moved by a hundredth.

        A tree that still pays stays chosen until another promises clearly more: each size is a program, and compiling one takes seconds.
        """
        key = (round(self.shift, 2), chains_only)
        if key not in self._plans:
            plan = make_plan(self.stored.costs, self.survival, shift=key[0], widest=1 if chains_only else self.widest)
            plan = staying(plan, self._chosen.get(chains_only))
            self._plans, self._chosen[chains_only] = {key: plan}, plan.chosen.tree
        return self._plans[key]

    def observe(self, tree: Tree | None, accept_lengths: Sequence[Sequence[int]]) -> None:
        """Takes in what a call with this tree accepted: tokens per cycle, per row; None: it decoded plainly."""
        if tree is None:
            self.shift *= FADING
            return
        # A row's last cycle is cut by the limit or a stop id: it says less than the truth.
        lengths = [kept for row in accept_lengths for kept in row[:-1]]
        if not lengths:
            return
        observed, cycles = sum(lengths) / len(lengths), float(len(lengths))
        seen = self.survival.shift_for(tree_name(tree), observed)
        self.shift = (self.shift * self.weight + seen * cycles) / (self.weight + cycles)
        self.weight = min(self.weight + cycles, MEMORY)


def resolve(target: Target, draft: Draft, tree: Chain | Tree | str | None, batch: int, chains_only: bool = False) -> Chain | Tree | None:
    """What to draft; None is plain decoding.

    A Chain or Tree is itself. "auto" measures at its first use. None is a stored choice, or the backend's usual size.
    Raises ValueError for anything else.
    """
    if isinstance(tree, (Chain, Tree)):
        return tree
    widest = int(draft.target_ids.shape[0])
    if tree is None:
        known = _known(target, draft, batch)
        if known is None:
            return default_tree(jax.default_backend(), 1 if chains_only else widest)
        return known.plan(chains_only).chosen.tree
    if tree != "auto":
        raise ValueError(f'tree: {tree!r} is neither a Chain nor a Tree nor "auto"')
    auto = _known(target, draft, batch) or measured(target, draft, batch)
    return auto.plan(chains_only).chosen.tree


def observe(target: Target, draft: Draft, tree: Tree | None, accept_lengths: Sequence[Sequence[int]]) -> None:
    """Tells the choice of this pair and batch size what a call with "auto" accepted."""
    auto = _known(target, draft, len(accept_lengths))
    if auto is not None:
        auto.observe(tree, accept_lengths)


def best_tree(target: Target, draft: Draft, batch: int, chains_only: bool = False) -> Tree:
    """The tree that comes closest to paying, for a pair and batch size whose choice is known. Raises ValueError where it is not."""
    known = _known(target, draft, batch)
    if known is None:
        raise ValueError("nothing was measured for this target, draft and batch size")
    tree = known.plan(chains_only).best_tree.tree
    assert tree is not None
    return tree


def measured(target: Target, draft: Draft, batch: int, survival: Survival | None = None) -> AutoTree:
    """Measures this machine, chooses and stores. survival: counts of the head; None: those stored before, or that came with it."""
    rows = _rows(batch)
    key = plan_store.identity(target, draft, rows)
    if survival is None:
        before = plan_store.load(key)
        survival = before.survival if before is not None and before.survival is not None else attached(draft)
    auto = AutoTree(Stored(measure(target, draft, rows), survival), int(draft.target_ids.shape[0]))
    plan = auto.plan()
    best = plan.best_tree
    summary = {
        "chosen": plan.chosen.name,
        "plain_seconds": auto.stored.costs.plain,
        "best_tree": best.name,
        "best_tree_speed_up": best.speed_up,
        "best_tree_acceptance_length": best.acceptance_length,
        "best_tree_cycle_seconds": best.cycle_seconds,
    }
    plan_store.save(key, auto.stored, summary)
    _remember(target, draft, rows, auto)
    return auto


def plan_file(target: Target, draft: Draft, batch: int) -> Path:
    """Where the choice for this pair and batch size is kept."""
    return plan_store.path_of(plan_store.identity(target, draft, _rows(batch)))


def _rows(batch: int) -> int:
    """Batch sizes share figures by powers of two."""
    return 1 << max(0, batch - 1).bit_length()


@dataclasses.dataclass
class _Entry:
    """A live pair and its choices by batch size; None: nothing is stored."""

    target: weakref.ref[Any]
    draft: weakref.ref[Any]
    by_rows: dict[int, AutoTree | None]


_live: dict[tuple[int, int], _Entry] = {}


def _entry(target: Target, draft: Draft) -> _Entry:
    key = (id(target), id(draft))
    entry = _live.get(key)
    if entry is None or entry.target() is not target or entry.draft() is not draft:
        for old in [k for k, e in _live.items() if e.target() is None or e.draft() is None]:
            del _live[old]
        entry = _live[key] = _Entry(weakref.ref(target), weakref.ref(draft), {})
    return entry


def _known(target: Target, draft: Draft, batch: int) -> AutoTree | None:
    """This process's choice, or the stored one."""
    rows, by_rows = _rows(batch), _entry(target, draft).by_rows
    if rows not in by_rows:
        if not plan_store.anything_stored():
            return None
        stored = plan_store.load(plan_store.identity(target, draft, rows))
        by_rows[rows] = None if stored is None else AutoTree(stored, int(draft.target_ids.shape[0]))
    return by_rows[rows]


def _remember(target: Target, draft: Draft, rows: int, auto: AutoTree) -> None:
    _entry(target, draft).by_rows[rows] = auto
