"""Interpreters of other environments, which hold what this one must not."""

from __future__ import annotations

import os

import pytest


def foreign_python(package: str) -> str:
    """The interpreter that EAGLE3_<PACKAGE>_PYTHON names, one that can import `package`; skips where the variable is not set."""
    variable = f"EAGLE3_{package.upper()}_PYTHON"
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} names no interpreter that has the package {package}")
    return path
