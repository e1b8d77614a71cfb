"""A tiny training as a program, to be killed and started again: killed_training.py FEATURES FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from training_set import tiny_cache, tiny_draft, tiny_frozen, tiny_target

from eagle3_jax.params import named_variables
from eagle3_jax.training.batches import BatchSource
from eagle3_jax.training.checkpoint import Checkpoints
from eagle3_jax.training.features import open_cache
from eagle3_jax.training.fit import fit
from eagle3_jax.training.reporting import Reporter
from eagle3_jax.training.trainer import TrainConfig
from eagle3_jax.training.ttt import recipe
from eagle3_jax.training.writers import JsonLines

STEPS = 60
CONFIG = TrainConfig(recipe=recipe("aligned", steps=2), steps=STEPS, rows=1, row_tokens=32, row_slots=30, warmup=2, accumulate=2)


def features(folder: Path) -> None:
    tiny_cache(folder)


def main(cache: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = BatchSource(lambda: open_cache(cache), CONFIG.recipe, seed=0, rows=1, width=CONFIG.row_tokens, slots=CONFIG.row_slots)
    checkpoints = Checkpoints(folder / "checkpoints", {}, keep=2)
    reporter = Reporter(STEPS, writers=[JsonLines(folder / "log.jsonl", checkpoints.latest or 0)])
    frozen = tiny_frozen(tiny_target())
    draft = fit(
        tiny_draft(), frozen, source, CONFIG, reporter=reporter, checkpoints=checkpoints, checkpoint_every=2, resume=True
    )  # fmt: skip
    reporter.close()
    checkpoints.close()
    np.savez(folder / "unfinished.npz", **{name: np.asarray(variable.get_value()) for name, variable in named_variables(draft)})  # pyright: ignore
    (folder / "unfinished.npz").rename(folder / "result.npz")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
