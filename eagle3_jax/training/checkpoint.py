"""Training checkpoints with Orbax: written in the background, atomic, the newest few and the best kept, refused when they belong to
another run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import PreservationContext, PreservationPolicy

from eagle3_jax.config import HEAD_VARIANTS
from eagle3_jax.training.batches import Cursor
from eagle3_jax.training.trainer import TrainConfig, TrainState


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the folder and what differs."""


class Checkpoints:
    """The checkpoints of one run in `folder`: the newest `keep`, and the one of the highest score where scores were given.

    identity: the JSON-like description of everything that decides what the run computes (the order of the data follows from its seed;
    training draws no other random numbers). say: told of a checkpoint that could not be written; training may go on, and what was
    written before stays.
    """

    def __init__(self, folder: str | Path, identity: Mapping[str, Any], keep: int = 2, say: Callable[[str], None] = print):
        # Orbax prints a line per array at INFO, and pages for an error that it raises as well; on a relative path it fails late.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.folder = Path(folder).absolute()
        self.identity = flatten(identity)
        self._say = say
        self._kept = _NewestAndBest(keep)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._manager = self._open()
        self._writing: int | None = None
        for step in self._manager.all_steps():
            # A run killed while it removed an old checkpoint leaves part of that one; the next removal takes the rest.
            with contextlib.suppress(OSError, ValueError, KeyError):
                self._kept.note(step, self._about(step).get("score"))

    def _open(self, cleanup: bool = True) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(preservation_policy=self._kept, cleanup_tmp_directories=cleanup)
        handlers = {"state": ocp.StandardCheckpointHandler(), "about": ocp.JsonCheckpointHandler()}
        return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def _about(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]

    @property
    def latest(self) -> int | None:
        """Updates done at the newest checkpoint, one being written included; None when there is none."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """Updates done at the checkpoint of the highest score, the later of two equal ones; None when none has a score."""
        return self._kept.best(self._manager.all_steps())

    def save(self, state: TrainState, cursor: Cursor, score: float | None = None) -> None:
        """Begins to write a checkpoint and returns. The arrays are copied first: the next step may take the state's buffers.

        Whatever keeps it from being written (a full disk, a read-only folder) is told to `say`, here or at the next call.
        """
        self.wait()
        self._writing = step = int(state.step)
        copies = {name: jnp.copy(value) for name, value in _leaves(state).items()}
        about = {"identity": self.identity, "cursor": dataclasses.asdict(cursor), "score": score}
        self._kept.note(step, score)
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(copies), about=ocp.args.JsonSave(about))
        try:
            self._manager.save(step, args=arguments, force=True)
        except Exception as error:
            self._lost(error)

    def wait(self) -> None:
        """Returns when nothing is being written any more."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._lost(error)
        self._writing = None

    def _lost(self, error: Exception) -> None:
        """Whatever Orbax, its storage library or the system raises while writing must not end a run."""
        with contextlib.suppress(Exception):
            self._manager.close()
        # Opened anew: the manager counts the checkpoint that failed, and no longer those that it was to replace.
        stays = "nothing can be read there now"
        with contextlib.suppress(Exception):
            self._manager = self._open(cleanup=False)
            last = self._manager.latest_step()
            stays = "there is no earlier one" if last is None else f"the one of step {last} stays"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        self._say(f"{self.folder}: the checkpoint of step {self._writing} could not be written ({reason}); {stays}. Training goes on")

    def check(self, step: int) -> dict[str, Any]:
        """What is written beside the arrays of a checkpoint. Raises CheckpointError as `restore` does for another run's."""
        about = self._about(step)
        different = differences(about["identity"], self.identity, step)
        if different:
            raise CheckpointError(f"{self.folder}: step {step} belongs to another run; {'; '.join(different)}")
        return about

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, Cursor]:
        """The newest checkpoint (or that of `step`), in the structure, shapes, types and sharding of `like`.

        Raises CheckpointError when there is none, when it was written by a run of another identity (each difference is shown), or when
        an array's shape or type differs.
        """
        self.wait()
        step = self.latest if step is None else step
        if step is None:
            raise CheckpointError(f"{self.folder}: no checkpoint to resume from")
        about = self.check(step)
        found, wanted = self._manager.item_metadata(step)["state"], _leaves(like)
        if found.keys() != wanted.keys():
            raise CheckpointError(f"{self.folder}: step {step} holds other arrays: {sorted(found.keys() ^ wanted.keys())[:5]}")
        for name, value in wanted.items():
            # Orbax casts without a word.
            if tuple(found[name].shape) != value.shape or found[name].dtype != value.dtype:
                raise CheckpointError(
                    f"{self.folder}: {name} is {found[name].dtype}{tuple(found[name].shape)}, needed {value.dtype}{value.shape}"
                )
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in wanted.items()}
        arrays = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes)))["state"]
        state = jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])
        return state, Cursor(**about["cursor"])

    def close(self) -> None:
        self.wait()
        self._manager.close()


class _NewestAndBest(PreservationPolicy):
    """Which checkpoints Orbax leaves in place."""

    def __init__(self, newest: int):
        self._newest = newest
        self._scores: dict[int, float] = {}

    def note(self, step: int, score: float | None) -> None:
        if score is not None:
            self._scores[step] = score

    def best(self, steps: Sequence[int]) -> int | None:
        scored = [step for step in steps if step in self._scores]
        return max(scored, key=lambda step: (self._scores[step], step), default=None)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: PreservationContext) -> Sequence[bool]:
        del context
        steps = [info.step for info in checkpoints]
        keep = {*sorted(steps)[-self._newest :], self.best(steps)}
        return [step in keep for step in steps]


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

    One change is allowed: the end of a schedule may be moved while the learning rate is still on its plateau in both. A setting that
    the checkpoint's program did not know yet had what is its default now.
    """
    saved = {**{key: value for key, value in _DEFAULTS.items() if key in wanted}, **saved}
    ignored: set[str] = set()
    if all(_on_plateau(run, step) for run in (saved, wanted)):
        ignored = {"train.steps", "train.decay"}
    keys = sorted((saved.keys() | wanted.keys()) - ignored)
    return [f"{k}: checkpoint {saved.get(k)!r}, asked for {wanted.get(k)!r}" for k in keys if saved.get(k) != wanted.get(k)]


def _on_plateau(run: Mapping[str, Any], step: int) -> bool:
    steps, decay = run.get("train.steps"), run.get("train.decay")
    return steps is not None and decay is not None and step <= steps - decay


_DEFAULTS = flatten({"train": dataclasses.asdict(TrainConfig()), "draft": dict.fromkeys((*HEAD_VARIANTS, "own_embedding"), False)})


def _leaves(state: TrainState) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
