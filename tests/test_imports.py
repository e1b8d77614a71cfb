"""Imports point downward: no two modules need each other, and no package needs one that stands above it."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "eagle3_jax"
UPWARD = ("native", "tuning", "weights", "data", "decoding", "bench", "training", "pods", "experiments")


def imports() -> dict[str, set[str]]:
    """Module name -> modules of the library that it imports, inside functions too. "data.order"; the package itself is ""."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path for path in ROOT.rglob("*.py")
    }
    found: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "eagle3_jax":
                module = (node.module or "").removeprefix("eagle3_jax").lstrip(".")
                inner = {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
                found[name] |= {each if each in paths else module for each in inner}
    return found


def test_no_cycle() -> None:
    found = imports()
    assert len(found) > 90 and any(found.values())
    TopologicalSorter({name: needs - {name} for name, needs in found.items()}).prepare()


def test_packages_stand_on_those_below() -> None:
    for name, needs in imports().items():
        if (package := name.split(".")[0]) in UPWARD:
            for need in needs:
                below = need.split(".")[0]
                assert below not in UPWARD or UPWARD.index(below) <= UPWARD.index(package), f"{name} imports {need}"
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()} == set(UPWARD)
