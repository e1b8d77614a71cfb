"""Training checkpoints with Orbax: atomic, the newest few kept, refused when they belong to another run."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from eagle3_jax.batches import Cursor
from eagle3_jax.trainer import TrainState


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the folder and what differs."""


class Checkpoints:
    """The checkpoints of one run in `folder`. `identity` is the JSON-like description of everything that decides what the run computes."""

    def __init__(self, folder: str | Path, identity: Mapping[str, Any], keep: int = 2):
        # Orbax prints a line per array at INFO, and fails late, in the background, on a relative path.
        logging.getLogger("absl").setLevel(logging.WARNING)
        self.folder = Path(folder).absolute()
        self.identity = flatten(identity)
        self.folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    @property
    def latest(self) -> int | None:
        """Updates done at the newest checkpoint; None when there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, cursor: Cursor) -> None:
        """Writes a checkpoint and returns when it is complete. The arrays are copied: the next step may take the state's buffers."""
        step = int(state.step)
        arrays = {name: np.array(value) for name, value in _leaves(state).items()}
        about = {"identity": self.identity, "cursor": dataclasses.asdict(cursor)}
        self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(about)), force=True)
        self._manager.wait_until_finished()

    def restore(self, like: TrainState) -> tuple[TrainState, Cursor]:
        """The newest checkpoint, in the structure, shapes and types of `like`.

        Raises CheckpointError when there is none, when it was written by a run of another identity (each difference is shown), or when
        an array's shape or type differs.
        """
        step = self.latest
        if step is None:
            raise CheckpointError(f"{self.folder}: no checkpoint to resume from")
        about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        different = differences(about["identity"], self.identity, step)
        if different:
            raise CheckpointError(f"{self.folder}: step {step} belongs to another run; {'; '.join(different)}")
        found = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
        wanted = _leaves(like)
        if found.keys() != wanted.keys():
            raise CheckpointError(f"{self.folder}: step {step} holds other arrays: {sorted(found.keys() ^ wanted.keys())[:5]}")
        for name, value in wanted.items():
            if found[name].shape != value.shape or found[name].dtype != value.dtype:
                raise CheckpointError(f"{self.folder}: {name} is {found[name].dtype}{found[name].shape}, needed {value.dtype}{value.shape}")
        state = jax.tree.unflatten(jax.tree.structure(like), [jax.numpy.asarray(found[name]) for name in wanted])
        return state, Cursor(**about["cursor"])

    def close(self) -> None:
        self._manager.close()


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; tuples become lists, as in JSON."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat.update(flatten(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = list(item) if isinstance(item, tuple) else item
    return flat


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], step: int) -> list[str]:
    """One line per field in which two flat identities differ.

    One change is allowed: the end of a schedule may be moved while the learning rate is still on its plateau in both.
    """
    ignored: set[str] = set()
    if all(_on_plateau(run, step) for run in (saved, wanted)):
        ignored = {"train.steps", "train.decay"}
    keys = sorted((saved.keys() | wanted.keys()) - ignored)
    return [f"{k}: checkpoint {saved.get(k)!r}, asked for {wanted.get(k)!r}" for k in keys if saved.get(k) != wanted.get(k)]


def _on_plateau(run: Mapping[str, Any], step: int) -> bool:
    steps, decay = run.get("train.steps"), run.get("train.decay")
    return steps is not None and decay is not None and step <= steps - decay


def _leaves(state: TrainState) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
