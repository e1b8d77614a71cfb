"""Settings and fixtures of the whole test run."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax
import pytest

from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.target import Target
from eagle3_jax.weights import load_draft, load_target

# Before the first array: the CPU unless the caller names another backend, and enough virtual devices for a small mesh.
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# A silent float64 or a silently broadcast axis is a defect here, wherever it happens.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

HERE = Path(__file__).parent
MAPPINGS = Path("/proc/self/maps")
# Nearly all the time of the fast tests goes into compiling programs that then run for milliseconds. LLVM without optimization, and
# XLA's older emitters instead of those by way of MLIR, where it still has them, take a third of it. What is tested stays: the program that
# JAX traces, and what XLA makes of it before code is generated (buffers, aliases, collectives). Only rounding differs.
# XLA aborts at a flag that it does not know, so these are for the versions of jaxlib 0.x that were tried.
LEVEL, EMITTERS = "--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false"
QUICK = {10: f"{LEVEL} {EMITTERS}", 12: LEVEL}


def pytest_configure(config: pytest.Config) -> None:
    """Fast tests compile quickly, the slow ones as users compile; `XLA_FLAGS= pytest` compiles everything so."""
    major, minor = map(int, version("jaxlib").split(".")[:2])
    if config.option.markexpr == "not slow" and major == 0 and minor in QUICK and jax.config.jax_platforms == "cpu":
        os.environ.setdefault("XLA_FLAGS", QUICK[minor])


@pytest.fixture(scope="module", autouse=True)
def _programs_are_let_go() -> Iterator[None]:
    """Drops compiled programs when there are many: each maps memory, and beyond Linux's 65,530 mappings the compiler aborts."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of numbers that the official PyTorch code produced (tests/golden/README.md)."""
    return HERE / "golden"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Data too large for the repository: `data` under $EAGLE3_SHARED, or under `shared` beside the checkout; skips without it."""
    root = Path(os.environ.get("EAGLE3_SHARED") or HERE.parent.parent / "shared")
    if not (root / "data").is_dir():
        pytest.skip(f"no folder {root / 'data'} (set EAGLE3_SHARED to the folder that holds it)")
    return root / "data"


@pytest.fixture(scope="session")
def golden_target(golden: Path) -> Target:
    """The tiny target of tests/golden in float32."""
    return load_target(golden / "target")


@pytest.fixture(scope="session")
def golden_draft(golden: Path, golden_target: Target) -> Eagle3Draft:
    """The tiny head of tests/golden in float32."""
    return load_draft(golden / "head", golden_target)
