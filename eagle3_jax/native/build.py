"""The custom calls of this folder, compiled by the machine's own C++ compiler for its own processor, once, and kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import jax

from eagle3_jax.processor import processor_name
from eagle3_jax.user_cache import cache_folder
from eagle3_jax.whole_file import whole_file

FOLDER = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
PRODUCT, ATTEND = "eagle3_product", "eagle3_attend"
"""Names of the custom calls, and of their functions."""

# For this machine's processor, by what its compiler calls that; contraction to fused multiply-adds everywhere, or rows would differ.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared")
PROCESSOR = (("-march=native",), ("-mcpu=native",), ())
PATIENCE = 120.0
"""Seconds that a compiler may take; it takes less than one."""


class NoNativeError(RuntimeError):
    """The custom calls are not to be had on this machine; says why."""


@functools.cache
def panel_width() -> int:
    """Numbers in a row of a panel, once the custom calls are registered with JAX.

    Raises NoNativeError: the CPU is not JAX's platform, there is no C++ compiler, it fails, or what it makes does not load.
    """
    if jax.default_backend() != "cpu":
        raise NoNativeError(f"JAX runs on {jax.default_backend()}, and the custom calls are for CPUs")
    try:
        library = ctypes.CDLL(str(compiled()))
        # The backend is there by now: a refusal concerns these calls alone.
        for name in (PRODUCT, ATTEND):
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except (OSError, AttributeError, RuntimeError) as error:
        raise NoNativeError(str(error)) from error
    return int(library.eagle3_panel_width())


def compiled(compilers: Sequence[str] = COMPILERS) -> Path:
    """The shared library for these sources, processor, compiler and JAX; compiled if it is not in the cache.

    Raises NoNativeError.
    """
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        raise NoNativeError(f"no C++ compiler is found (looked for {', '.join(compilers)})")
    sources = sorted(FOLDER.glob("*.cc"))
    text = b"".join(path.read_bytes() for path in (*sources, *sorted(FOLDER.glob("*.h"))))
    about = (processor_name(), version("jaxlib"), os.path.realpath(compiler), *FLAGS)
    name = hashlib.sha256(text + repr(about).encode()).hexdigest()[:16]
    path = cache_folder() / "native" / f"kernels-{name}.so"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    complaints = []
    with whole_file(path) as part:
        for processor in PROCESSOR:
            complaint = _compile([compiler, *FLAGS, *processor, f"-I{jax.ffi.include_dir()}", *map(str, sources), "-o", str(part)])
            if complaint is None:
                break
            complaints.append(complaint)
        else:
            raise NoNativeError(f"{compiler} fails: {complaints[-1]}")
    return path


def _compile(command: Sequence[str]) -> str | None:
    """What the compiler complains of, in a line; None when it made the file."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (ran.stderr.strip().splitlines() or ["no message"])[0] if ran.returncode else None
