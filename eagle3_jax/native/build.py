"""The custom calls of this folder, compiled by the machine's own C++ compiler for its own processor, once, and kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import jax

from eagle3_jax.processor import processor_name
from eagle3_jax.user_cache import cache_folder

FOLDER = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
PRODUCT, ATTEND, UNIFORMS, CROSS_ENTROPY = "eagle3_product", "eagle3_attend", "eagle3_uniforms", "eagle3_cross_entropy"
BFLOAT = "eagle3_bfloat"
"""Names of the custom calls, and of their functions; the last one has its gradients and an argmax beside it."""

FIRST_TURNED, SECOND_TURNED, BEST = "_first_turned", "_second_turned", "_best"
BFLOAT_NAMES = tuple(BFLOAT + kind for kind in ("", FIRST_TURNED, SECOND_TURNED, BEST, BEST + SECOND_TURNED))
NAMES = (PRODUCT, ATTEND, UNIFORMS, CROSS_ENTROPY, *BFLOAT_NAMES)

# For this machine's processor, by what its compiler calls that; contraction to fused multiply-adds everywhere, or rows would differ.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared")
PROCESSOR = (("-march=native",), ("-mcpu=native",), ())
PATIENCE = 120.0
"""Seconds that a compiler may take; it takes a few."""


class NoNativeError(RuntimeError):
    """The custom calls are not to be had on this machine; says why."""


_LOCK = threading.Lock()


def panel_width() -> int:
    """Numbers in a row of a panel, once the custom calls are registered with JAX.

    Raises NoNativeError: the CPU is not JAX's platform, there is no C++ compiler, it fails, or what it makes does not load.
    """
    return int(_registered().eagle3_panel_width())


def available() -> bool:
    """Whether there are the custom calls in this process; they are registered with JAX then."""
    try:
        return panel_width() > 0
    except NoNativeError:
        return False


def has_bfloat() -> bool:
    """Whether this processor multiplies bfloat16 numbers by itself. Raises as above."""
    return bool(_registered().eagle3_has_bfloat())


def bfloat_group() -> int:
    """How many columns of a product the argmax takes together. Raises as above."""
    return int(_registered().eagle3_bfloat_group())


def _registered() -> ctypes.CDLL:
    with _LOCK:  # the name of a custom call is taken once
        library = _library_or_reason()
    if isinstance(library, str):
        raise NoNativeError(library)
    return library


@functools.cache
def _library_or_reason() -> ctypes.CDLL | str:
    """Asked once in a process: a compiler that fails, or does not end, would do so for every model."""
    if jax.default_backend() != "cpu":
        return f"JAX runs on {jax.default_backend()}, and the custom calls are for CPUs"
    try:
        library = ctypes.CDLL(str(compiled()))
        # The backend is there by now: a refusal concerns these calls alone.
        for name in NAMES:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except (OSError, AttributeError, RuntimeError) as error:
        return str(error)
    return library


def compiled(compilers: Sequence[str] = COMPILERS) -> Path:
    """The shared library for these sources, processor, compiler and JAX; compiled if it is not in the cache.

    Raises NoNativeError.
    """
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        raise NoNativeError(f"no C++ compiler is found (looked for {', '.join(compilers)})")
    sources = sorted(FOLDER.glob("*.cc"))
    text = b"".join(path.read_bytes() for path in (*sources, *sorted(FOLDER.glob("*.h"))))
    program = os.stat(compiler)  # of what a link points to; a compiler may be replaced where it lies
    about = (processor_name(), version("jaxlib"), os.path.realpath(compiler), program.st_size, program.st_mtime_ns, *FLAGS, *PROCESSOR)
    name = f"kernels-{_digest(text + repr(about).encode())}"
    folder = cache_folder() / "native"
    # The name ends with a digest of the file: to load one that was cut short kills the process.
    for path in sorted(folder.glob(f"{name}-*.so")):
        if path.stem == f"{name}-{_digest(path.read_bytes())}":
            return path
    folder.mkdir(parents=True, exist_ok=True)
    complaint = None
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        part = Path(scratch) / "kernels.so"
        for processor in PROCESSOR:
            complaint = _compile([compiler, *FLAGS, *processor, f"-I{jax.ffi.include_dir()}", *map(str, sources), "-o", str(part)])
            if complaint is None:
                return part.replace(folder / f"{name}-{_digest(part.read_bytes())}.so")
    raise NoNativeError(f"{compiler} fails: {complaint}")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _compile(command: Sequence[str]) -> str | None:
    """What the compiler complains of, in a line; None when it made the file. Raises NoNativeError when it does not end."""
    try:
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise NoNativeError(f"{command[0]} does not end within {PATIENCE:g} s") from error
    except OSError as error:
        return str(error)
    return (ran.stderr.strip().splitlines() or ["no message"])[0] if ran.returncode else None
