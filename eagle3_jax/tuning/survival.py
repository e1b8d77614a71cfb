"""How many drafts stand, for every size of tree: the half of a speed-up that the head decides.

One recorded run with a large tree tells it for all smaller ones (`eagle3_jax.bench.replay`). The counts travel with a head as
`survival.json`. A head's acceptance elsewhere, on other text or of another head, is described by ONE number: a shift of the log-odds
of every conditional acceptance rate. It is found from whatever tree was in use and holds for every other.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.tree import Chain, Tree
from eagle3_jax.tree_names import parse_tree, tree_name

FORMAT = "eagle3_jax survival 1"
FILE = "survival.json"
LARGEST_SHIFT = 8.0


@dataclasses.dataclass(frozen=True)
class Survival:
    """cycles: draft cycles counted. stood: per tree name, in how many of them at least 1, 2, ... depth drafts stood.

    source: what was counted, for people.
    """

    cycles: int
    stood: Mapping[str, tuple[int, ...]]
    source: str

    def length(self, name: str, shift: float = 0.0) -> float:
        """Expected acceptance length of a tree, the target's own token included, with every rate's log-odds shifted."""
        length, chance = 1.0, 1.0
        for rate in self._rates(name):
            chance *= _shifted(rate, shift)
            length += chance
        return length

    def shift_for(self, name: str, observed: float) -> float:
        """The shift at which tree `name` has the observed acceptance length, within +-8."""
        low, high = -LARGEST_SHIFT, LARGEST_SHIFT
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.length(name, middle) < observed else (low, middle)
        return (low + high) / 2

    def _rates(self, name: str) -> list[float]:
        """Conditional rates by depth; where nothing got so deep, the rate before."""
        rates, before = [], self.cycles
        for count in self.stood[name]:
            rates.append(count / before if before else (rates[-1] if rates else 0.0))
            before = count
        return rates

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {"format": FORMAT, "source": self.source, "cycles": self.cycles, "stood": {k: list(v) for k, v in self.stood.items()}}

    @classmethod
    def from_json(cls, value: Any, where: str) -> Survival:
        """Raises ValueError naming `where` and the key for anything that `to_json` would not have written."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f"{where}: not a file of acceptance counts (format {FORMAT!r})")
        cycles, stood = value.get("cycles"), value.get("stood")
        if not isinstance(cycles, int) or cycles < 1 or not isinstance(stood, dict) or not stood:
            raise ValueError(f"{where}: needs cycles >= 1 and counts for at least one tree")
        for name, counts in stood.items():
            shape = parse_tree(name)
            depth = shape.tree.depth if isinstance(shape, (Chain, Tree)) else 0
            falling = all(isinstance(c, int) and a >= c >= 0 for a, c in itertools.pairwise([cycles, *counts]))
            if len(counts) != depth or not falling:
                raise ValueError(f"{where}: the counts of {name!r} must be {depth} whole numbers that never grow, from {cycles} down")
        return cls(cycles, {name: tuple(counts) for name, counts in stood.items()}, str(value.get("source", "")))


def read_survival(path: Path) -> Survival:
    """Acceptance counts from a JSON file. Raises ValueError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    return Survival.from_json(value, str(path))


_attached: dict[int, tuple[weakref.ref[Any], Survival]] = {}


def attach(draft: Any, survival: Survival) -> None:
    """Remembers the counts of a loaded head for as long as it lives."""
    for key in [key for key, (owner, _) in _attached.items() if owner() is None]:
        del _attached[key]
    _attached[id(draft)] = (weakref.ref(draft), survival)


def attached(draft: Any) -> Survival | None:
    """The counts that came with a head, or None."""
    owner, survival = _attached.get(id(draft), (lambda: None, None))
    return survival if owner() is draft else None


def typical_survival() -> Survival:
    """The counts of the head that comes with the package: a first guess at any other head's, to be shifted by what is observed."""
    return read_survival(Path(__file__).parent.parent / "heads" / "smollm2-135m" / FILE)


NODES = (4, 6, 8, 12, 16, 24, 32, 48, 60)
WIDTHS = (2, 3, 4, 6, 8, 10)
DEPTHS = tuple(range(1, 9))


def candidates() -> list[Tree]:
    """The sizes that are considered: chains of 1 to 8, and trees of up to 60 nodes that are no chain and can use their depth and width."""
    found = [Chain(depth).tree for depth in DEPTHS]
    for depth, width in itertools.product(DEPTHS, WIDTHS):
        room = width + (depth - 1) * width**2
        found += [Tree(n, depth, width) for n in NODES if max(depth + 2, width + 1) <= n <= room + 1]
    return found


def candidate_names() -> list[str]:
    return [tree_name(tree) for tree in candidates()]


def _shifted(rate: float, shift: float) -> float:
    if shift == 0.0:
        return rate
    # A rate of 0 or 1 out of few cycles is no certainty.
    rate = min(max(rate, 0.005), 0.995)
    return 1.0 / (1.0 + math.exp(-(math.log(rate / (1.0 - rate)) + shift)))
