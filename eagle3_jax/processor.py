"""A name for the instruction set of this machine: what was compiled or measured on one CPU may not serve another."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from pathlib import Path


def processor_name() -> str:
    """Such as "x86_64-1f0e2d3c4b5a": the architecture and a hash of the CPU's features."""
    features = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
