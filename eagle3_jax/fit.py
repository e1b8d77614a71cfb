"""The training loop: batches in, updates, checkpoints, held-out numbers, a trained draft out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np

from eagle3_jax.batches import BatchSource, Cursor
from eagle3_jax.checkpoint import Checkpoints
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.reporting import Reporter
from eagle3_jax.trainer import Fixed, TrainConfig, TrainState, evaluate, join, new_state, split, train_step
from eagle3_jax.ttt import Batch, Frozen


def fit(
    draft: Eagle3Draft,
    frozen: Frozen,
    source: BatchSource,
    config: TrainConfig,
    *,
    reporter: Reporter,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int = 200,
    held_out: Callable[[], Iterator[Batch]] | None = None,
    evaluate_every: int = 100,
    resume: bool = False,
) -> Eagle3Draft:
    """Trains `draft` (float32) for `config.steps` updates and returns the trained module.

    resume: goes on from the newest checkpoint when there is one, with the batches, learning rates and parameters of a run never stopped.
    """
    params, variables = split(draft, config.recipe)
    state, cursor, fixed = new_state(params, config), Cursor(), Fixed(frozen, variables)
    if checkpoints is not None and resume and checkpoints.latest is not None:
        state, cursor = checkpoints.restore(state)
        reporter.say(f"resumed at step {int(state.step)}, epoch {cursor.epoch}, batch {cursor.batch}")
    done = int(state.step)
    stream = source.plan(cursor)

    def save(state: TrainState) -> None:
        if checkpoints is not None and checkpoints.latest != int(state.step):
            checkpoints.save(state, cursor)

    def measure(state: TrainState) -> None:
        if held_out is not None:
            reporter.flush()
            reporter.evaluation(done, evaluate(draft.config, config.recipe, state.params, fixed, held_out()))

    while done < config.steps:
        parts = []
        for _ in range(config.accumulate):
            rows, cursor = next(stream)
            parts.append(source.build(rows))
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
        state, metrics = train_step(draft.config, config, state, fixed, batch)
        done += 1
        reporter.step(done, int(np.sum(batch.valid)), metrics)
        if done % evaluate_every == 0 and done < config.steps:
            measure(state)
        if done % checkpoint_every == 0:
            save(state)
    reporter.flush()
    save(state)
    measure(state)
    return join(draft.config, state.params, variables)
