"""Choices that outlive the process: one JSON file per machine, versions, target and head, in the user's cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np

from eagle3_jax.processor import processor_name
from eagle3_jax.tuning.costs import Costs
from eagle3_jax.tuning.survival import Survival
from eagle3_jax.user_cache import cache_folder
from eagle3_jax.whole_file import write_json

FORMAT = "eagle3_jax plan 1"


@dataclasses.dataclass(frozen=True)
class Stored:
    """costs: passes of this machine. survival: what is known of the head; None: only a typical head's."""

    costs: Costs
    survival: Survival | None


def identity(target: Any, draft: Any, batch: int) -> dict[str, Any]:
    """What a choice depends on: the machine and its libraries, the shapes, and a fingerprint of either model's weights."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": max((len(x.sharding.device_set) for x in jax.tree.leaves(target)), default=1),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "batch": batch,
        "target": fingerprint(target),
        "draft": f"{type(draft).__name__} {fingerprint(draft)}",
    }


def fingerprint(model: Any, arrays: int = 12, values: int = 16) -> str:
    """A hash of every array's shape and type, and of the first numbers of a dozen of them: cheap, and another model's differs."""
    leaves = jax.tree.leaves(model)
    digest = hashlib.sha256(repr([(x.shape, str(x.dtype)) for x in leaves]).encode())
    # A norm's weights may be all ones in any model: the largest arrays tell models apart.
    for leaf in sorted(leaves, key=lambda x: -x.size)[:arrays]:
        part = leaf.addressable_data(0)
        on_host = next(iter(part.devices())).platform == "cpu"
        first = (0,) * (leaf.ndim - 1) + (slice(0, values),) if leaf.ndim else ()
        # On the CPU numpy reads the buffer itself; elsewhere only these numbers are fetched.
        digest.update(np.asarray(np.asarray(part)[first] if on_host else part[first]).astype(np.float32).tobytes())
    return digest.hexdigest()[:16]


def anything_stored() -> bool:
    """Whether there is any plan at all: if not, nobody need know whose it would be."""
    folder = cache_folder() / "plans"
    return folder.is_dir() and any(folder.glob("*.json"))


def path_of(key: dict[str, Any]) -> Path:
    """The file of an identity."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "plans" / f"{name}.json"


def load(key: dict[str, Any]) -> Stored | None:
    """What was stored for exactly this identity, or None. A file that cannot be read is named in a warning and counts as none."""
    path = path_of(key)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return _unusable(path, error)
    try:
        if value["format"] != FORMAT or value["key"] != key:
            raise ValueError(f"not a plan of this machine and models (format {FORMAT!r})")
        survival = value["survival"]
        return Stored(Costs.from_json(value["costs"]), None if survival is None else Survival.from_json(survival, str(path)))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return _unusable(path, error)


def save(key: dict[str, Any], stored: Stored, summary: dict[str, Any]) -> Path:
    """Writes the file whole or not at all; `summary` is for people and is not read back. Returns its path."""
    path = path_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {
        "format": FORMAT,
        "key": key,
        "summary": summary,
        "costs": stored.costs.to_json(),
        "survival": None if stored.survival is None else stored.survival.to_json(),
    }
    write_json(path, value)
    return path


def _unusable(path: Path, error: Exception) -> None:
    warnings.warn(f'{path}: cannot be used, and is measured anew by tree="auto" ({error}); delete it', stacklevel=4)
