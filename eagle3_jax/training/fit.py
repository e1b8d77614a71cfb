"""The training loop: batches in, updates, checkpoints, held-out numbers, a trained draft out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from eagle3_jax.draft import Eagle3Draft, table
from eagle3_jax.target import Target
from eagle3_jax.training.batches import BatchSource, Cursor
from eagle3_jax.training.checkpoint import Checkpoints
from eagle3_jax.training.placing import check_rows, own_rows, place_batch, place_fixed, place_rows, place_state, whole
from eagle3_jax.training.reporting import Reporter
from eagle3_jax.training.trainer import Fixed, TrainConfig, TrainState, evaluate, in_type, join, new_state, split, train_step
from eagle3_jax.training.ttt import Batch, Frozen


def fit(
    draft: Eagle3Draft,
    frozen: Frozen,
    source: BatchSource,
    config: TrainConfig,
    *,
    target: Target | None = None,
    reporter: Reporter,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int = 200,
    held_out: Callable[[], Iterator[Batch]] | None = None,
    evaluate_every: int = 100,
    decode: Callable[[Eagle3Draft], float] | None = None,
    decode_type: str | None = None,
    decode_every: int = 1000,
    resume: bool = False,
    mesh: Mesh | None = None,
) -> Eagle3Draft:
    """Trains `draft` (float32) for `config.steps` updates and returns the trained module.

    target: for an online configuration, whose batches hold token ids alone. decode: the acceptance length of a real decode with a draft of
    `decode_type` (None: the compute type), taken every `decode_every` updates and at the end; its value is the score of a checkpoint of
    that moment, and the draft of the best one is returned. resume: goes on from the newest checkpoint when there is one, with the batches,
    learning rates and parameters of a run never stopped. mesh: the step runs on it, each process reading the rows of its own devices; a
    checkpoint may have been written on another. Raises ValueError when the rows of a micro-batch cannot be dealt out over the mesh.
    """
    if config.online != (target is not None):
        raise ValueError("an online configuration needs the target, and no other takes it")
    check_rows(config.rows, mesh)
    params, variables = split(draft, config.recipe)
    frozen = dataclasses.replace(frozen, embed=table(draft, frozen.embed))
    state, cursor = place_state(new_state(params, config), draft.config, mesh), Cursor()
    fixed = place_fixed(Fixed(frozen, variables, target), draft.config, mesh)
    if checkpoints is not None and resume and checkpoints.latest is not None:
        state, cursor = checkpoints.restore(state)
        reporter.say(f"resumed at step {int(state.step)}, epoch {cursor.epoch}, batch {cursor.batch}")
    done = int(state.step)
    stream = source.plan(cursor)

    def save(state: TrainState, score: float | None = None) -> None:
        # The records first: a run killed behind its checkpoint has then lost none.
        reporter.flush()
        if checkpoints is not None and checkpoints.latest != int(state.step):
            checkpoints.save(state, cursor, score)

    def measure(state: TrainState) -> None:
        if held_out is not None:
            reporter.flush()
            reporter.evaluation(done, evaluate(draft.config, config.recipe, state.params, fixed, place_rows(held_out(), mesh)))

    def spoken(state: TrainState) -> float | None:
        if decode is None:
            return None
        reporter.flush()
        length = decode(join(draft.config, in_type(state.params, decode_type or config.compute), fixed.variables))
        reporter.decoded(done, length)
        return length

    while done < config.steps:
        parts, tokens = [], 0
        for _ in range(config.accumulate):
            rows, cursor = next(stream)
            parts.append(source.build(rows, own_rows(config.rows, mesh)))
            tokens += source.tokens(rows)
        batch = place_batch(jax.tree.map(lambda *leaves: np.stack(leaves), *parts), config.rows, mesh)
        state, metrics = train_step(draft.config, config, state, fixed, batch)
        done += 1
        reporter.step(done, tokens, metrics)
        if done == config.steps:
            break
        if done % evaluate_every == 0:
            measure(state)
        score = spoken(state) if done % decode_every == 0 else None
        if score is not None or done % checkpoint_every == 0:
            save(state, score)
    if checkpoints is None or checkpoints.latest != done:
        save(state, spoken(state))
    measure(state)
    if checkpoints is not None and checkpoints.best not in (None, done):
        best = checkpoints.best
        state, _ = checkpoints.restore(state, best)
        reporter.say(f"the draft of step {best} has the best acceptance length; it is the result")
    return join(draft.config, whole(state.params) if jax.process_count() > 1 else state.params, variables)
