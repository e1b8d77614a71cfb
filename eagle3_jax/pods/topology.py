"""TPU pods that are not there: devices to compile for, with what one of them holds."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX sees it: `memory` in bytes. A TPU7x chip is two devices."""

    name: str
    memory: int


CHIPS = {
    "TPU v4": Chip("v4", 32 * GIB),
    "TPU v5 lite": Chip("v5e", 16 * GIB),
    "TPU v5": Chip("v5p", 95 * GIB),
    "TPU v5p": Chip("v5p", 95 * GIB),
    "TPU v6 lite": Chip("v6e", 32 * GIB),
    "TPU7x": Chip("TPU7x, half a chip", 96 * GIB),
}
"""By device kind; figures of the Cloud TPU documentation."""


def topology_devices(name: str, libtpu: str | None = None) -> tuple[list[Any], Chip]:
    """The devices of a topology such as "v5e:4x4" or "v5p:4x4x4" and what each is; nothing runs on them, programs compile for them.

    libtpu: the folder that `pip install --target FOLDER libtpu` filled, where the package is not installed beside JAX (which would
    make JAX look for TPUs at every start). Raises ValueError naming what is missing or unknown.
    """
    from jax.experimental import topologies

    if libtpu is not None:
        if not (Path(libtpu) / "libtpu").is_dir():
            raise ValueError(f"{libtpu}: no folder libtpu in it; fill it with: pip install --target {libtpu} 'libtpu=={wanted_libtpu()}'")
        sys.path.insert(0, str(Path(libtpu).absolute()))
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"compiling for TPUs needs the package libtpu: pip install --target FOLDER 'libtpu=={wanted_libtpu()}', then --libtpu FOLDER"
        )
    # No TPU is touched, so that it does not matter who else has loaded the library.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        devices = list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:
        raise ValueError(f"topology {name!r}: {' '.join(str(error).split())[:200]} (examples: v5e:4x4, v6e:8x8, v5p:4x4x4)") from None
    kind = devices[0].device_kind
    if kind not in CHIPS:
        raise ValueError(f"topology {name!r}: the memory of a {kind!r} is not known here (known: {', '.join(CHIPS)})")
    return devices, CHIPS[kind]


def wanted_libtpu() -> str:
    """The version that the installed JAX names for its TPU extra; any where it names none."""
    return next(_libtpu_pins(metadata.requires("jax") or []), "*")


def _libtpu_pins(requirements: list[str]) -> Iterator[str]:
    for requirement in requirements:
        if requirement.startswith("libtpu=="):
            yield requirement.split(";")[0].removeprefix("libtpu==").strip()
