"""Training on a mesh is training: the same updates as on one device, whatever the mesh's shape."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_set import KEPT, TARGET, parameters, selection, tiny_frozen

from eagle3_jax.config import DraftConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import initialize
from eagle3_jax.pods.hlo import cost
from eagle3_jax.sharding import make_mesh
from eagle3_jax.target import Target
from eagle3_jax.training.batches import BatchSource, Cursor, TokenExamples
from eagle3_jax.training.checkpoint import Checkpoints
from eagle3_jax.training.distributed import join_processes
from eagle3_jax.training.fit import fit
from eagle3_jax.training.placing import place_batch, place_fixed, place_state
from eagle3_jax.training.reporting import Reporter
from eagle3_jax.training.trainer import Fixed, TrainConfig, new_state, split, train_step
from eagle3_jax.training.ttt import recipe

# Two key/value heads, so that a tensor axis of two splits the attention of both models.
SHAPE = dataclasses.replace(TARGET, num_kv_heads=2, num_layers=2)
# Eight rows, of which the last batch of an epoch fills a few: devices whose rows are all padding add nothing.
CONFIG = TrainConfig(
    recipe=recipe("aligned", steps=2), steps=10, rows=8, row_tokens=24, row_slots=20, warmup=2, peak_lr=1e-3, accumulate=2, online=True
)
MESHES = [(d, f, 8 // (d * f)) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if 8 % (d * f) == 0]


class Records(list):
    def write(self, record) -> None:
        self.append(record)

    def close(self) -> None:
        pass


def models() -> tuple[Target, Eagle3Draft]:
    target = initialize(Target(SHAPE), jax.random.key(0))
    draft = initialize(Eagle3Draft(DraftConfig.for_target(SHAPE, len(KEPT), (0, 1))), jax.random.key(1))
    draft.d2t[...] = jnp.asarray(KEPT)
    return target, draft


def source(config: TrainConfig = CONFIG) -> BatchSource:
    sizes = dict(rows=config.rows, width=config.row_tokens, slots=config.row_slots)
    return BatchSource(lambda: TokenExamples(selection()), config.recipe, seed=0, **sizes)


def run(shape: tuple[int, int, int] | None, **options) -> tuple[dict[str, np.ndarray], list[float]]:
    """Parameters and losses of ten updates."""
    target, draft = models()
    records = Records()
    reporter = Reporter(CONFIG.steps, writers=[records])
    mesh = None if shape is None else make_mesh(*shape)
    held_out = source().once if options.pop("held_out", False) else None
    try:
        trained = fit(
            draft, tiny_frozen(target), source(), CONFIG, target=target, reporter=reporter, mesh=mesh, held_out=held_out, **options
        )
    finally:
        reporter.close()
    losses = [record["loss"] for record in records if "loss" in record]
    losses += [x for record in records if "held_out" in record for numbers in record["held_out"].values() for x in numbers]
    return parameters(trained), losses


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, np.ndarray], list[float]]:
    return run(None, held_out=True)


@pytest.mark.filterwarnings("ignore:tensor=. does not divide:UserWarning")
@pytest.mark.parametrize("shape", [s if s == (2, 2, 2) else pytest.param(s, marks=pytest.mark.slow) for s in MESHES])
def test_ten_updates_on_eight_devices_are_those_of_one(alone, shape: tuple[int, int, int]):
    params, losses = run(shape, held_out=True)
    np.testing.assert_allclose(losses, alone[1], rtol=1e-5, atol=1e-5)
    assert len(losses) == 10 + 6
    for name, value in alone[0].items():
        np.testing.assert_allclose(params[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_a_checkpoint_is_read_back_on_another_mesh_value_for_value(tmp_path: Path):
    _, draft = models()
    params, _ = split(draft, CONFIG.recipe)
    written = place_state(new_state(params, CONFIG), draft.config, make_mesh(4, 2, 1))
    rng = np.random.default_rng(0)
    written = jax.tree.map(lambda x: x + jnp.asarray(rng.random(x.shape), x.dtype) if x.ndim else x, written)
    for shape in ((1, 8, 1), None):
        checkpoints = Checkpoints(tmp_path / str(shape), {})
        checkpoints.save(written, Cursor(1, 2))
        like = place_state(new_state(params, CONFIG), draft.config, None if shape is None else make_mesh(*shape))
        read, cursor = checkpoints.restore(like)
        checkpoints.close()
        assert cursor == Cursor(1, 2)
        jax.tree.map(np.testing.assert_array_equal, read, written)
        assert jax.tree.map(lambda x: x.sharding, read) == jax.tree.map(lambda x: x.sharding, like)


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(alone, tmp_path: Path):
    """Broken off on 4 x 2 in the seventh update, ended on 1 x 8: the run on one device."""
    broken, build = source(), BatchSource.build
    left = iter(range(13))

    def stopping(*args):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return build(broken, *args)

    broken.build = stopping
    target, draft = models()
    shapes = {"broken": (4, 2, 1), "ended": (1, 8, 1)}
    for name, shape in shapes.items():
        checkpoints, reporter = Checkpoints(tmp_path, {}), Reporter(CONFIG.steps)
        options = dict(target=target, reporter=reporter, checkpoints=checkpoints, checkpoint_every=2, mesh=make_mesh(*shape), resume=True)
        try:
            if name == "broken":
                with pytest.raises(KeyboardInterrupt):
                    fit(draft, tiny_frozen(target), broken, CONFIG, **options)
            else:
                trained = parameters(fit(draft, tiny_frozen(target), source(), CONFIG, **options))
        finally:
            reporter.close()
            checkpoints.close()
    for name, value in alone[0].items():
        np.testing.assert_allclose(trained[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_rows_that_cannot_be_dealt_out():
    target, draft = models()
    config = dataclasses.replace(CONFIG, rows=6)
    with pytest.raises(ValueError, match="6 rows per micro-batch cannot be split over data 2 x fsdp 4: take a multiple of 8"):
        fit(draft, tiny_frozen(target), source(config), config, target=target, reporter=Reporter(1), mesh=make_mesh(2, 4, 1))


@pytest.mark.slow
def test_each_parameter_crosses_the_devices_once_a_batch():
    """Chunks of a row loop, but no loop moves a parameter or its gradient: gathers and scatters are as many as split parameters."""
    _, draft = models()
    mesh = make_mesh(1, 8, 1)
    offline = dataclasses.replace(CONFIG, online=False, accumulate=1)
    params, variables = split(draft, CONFIG.recipe)
    target, _ = models()
    fixed = place_fixed(Fixed(tiny_frozen(target), variables), draft.config, mesh)
    state = place_state(new_state(params, offline), draft.config, mesh)
    own = source(offline)
    batch = own.build(next(own.plan(Cursor()))[0])
    known = dict(features=np.zeros((8, 24, 32), np.float32), hidden=np.zeros((8, 24, 16), np.float32), argmax=np.zeros((8, 24), np.int32))
    batch = jax.tree.map(lambda x: x[None], dataclasses.replace(batch, **known))
    batch = place_batch(batch, 8, mesh)
    counted = cost(train_step.lower(draft.config, offline, state, fixed, batch).compile().as_text())
    split_ones = [name for name, x in state.params.items() if not x.sharding.is_fully_replicated]
    assert counted.unknown_loops == 0
    # The teacher's head and the looked-up embeddings besides.
    assert counted.collectives["all-gather"].count <= len(split_ones) + 4
    scattered = counted.collectives.get("reduce-scatter")
    assert scattered is not None and scattered.count <= len(split_ones)


@pytest.mark.slow
def test_two_processes_are_one(alone, tmp_path: Path):
    """Each reads its half of every batch; the numbers are those of one process, which can read the checkpoint they wrote together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("two_processes.py")
    path = os.pathsep.join([str(script.parent), str(script.parent.parent)])
    started = [
        subprocess.Popen(
            [sys.executable, script, str(port), str(process), tmp_path],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in (0, 1)
    ]
    said = [process.communicate(timeout=500)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    result = dict(np.load(tmp_path / "result.npz"))
    np.testing.assert_allclose(result.pop("losses"), alone[1], rtol=1e-5, atol=1e-5)
    for name, value in alone[0].items():
        np.testing.assert_allclose(result[name], value, rtol=0, atol=1e-5, err_msg=name)
    _, draft = models()
    checkpoints = Checkpoints(tmp_path / "checkpoints", {})
    state, _ = checkpoints.restore(new_state(split(draft, CONFIG.recipe)[0], CONFIG))
    checkpoints.close()
    for name, value in state.params.items():
        np.testing.assert_array_equal(value, result[name], err_msg=name)


def test_processes_that_are_named_by_halves():
    with pytest.raises(ValueError, match="--processes, --process: missing"):
        join_processes("localhost:1234")
    with pytest.raises(ValueError, match=r"--process 2: must lie in 0\.\.1"):
        join_processes("localhost:1234", 2, 2)
