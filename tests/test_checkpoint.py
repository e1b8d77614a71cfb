"""Checkpoints when things go wrong: full disks, folders that cannot be written, processes killed at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from killed_training import STEPS, features
from training_set import tiny_draft

from eagle3_jax.training.batches import Cursor
from eagle3_jax.training.checkpoint import Checkpoints, differences
from eagle3_jax.training.trainer import TrainConfig, TrainState, new_state, split
from eagle3_jax.training.ttt import RECIPES
from eagle3_jax.training.writers import JsonLines

CONFIG = TrainConfig()


def state(step: int) -> TrainState:
    fresh = new_state(split(tiny_draft(), RECIPES["aligned"])[0], CONFIG)
    return TrainState(jax.tree.map(lambda x: x + step, fresh.params), fresh.opt_state, jnp.asarray(step, jnp.int32))


def equal(one: TrainState, other: TrainState) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, {"a": 1}, keep=2)
    for step, score in enumerate([1.1, None, 1.8, 1.3, 1.8, None, None, 1.2], start=1):
        checkpoints.save(state(step), Cursor(0, step), score)
    checkpoints.wait()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [5, 7, 8]
    checkpoints.close()
    again = Checkpoints(tmp_path, {"a": 1}, keep=2)
    assert (again.best, again.latest) == (5, 8)
    restored, cursor = again.restore(state(0), again.best)
    equal(restored, state(5))
    assert cursor == Cursor(0, 5)
    again.close()


def test_a_removal_cut_short_stands_in_nobodys_way(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, {}, keep=2)
    for step in (1, 2):
        checkpoints.save(state(step), Cursor(0, step), float(step))
    checkpoints.close()
    for part in ("about", "state"):
        shutil.rmtree(tmp_path / "1" / part)
    again = Checkpoints(tmp_path, {}, keep=2)
    assert (again.best, again.latest) == (2, 2)
    equal(again.restore(state(0))[0], state(2))
    for step in (3, 4):
        again.save(state(step), Cursor(0, step))
    again.close()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [2, 3, 4]


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """No file can grow beyond a few bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The folder takes no new entries; root, whom that does not stop, becomes nobody meanwhile."""
    root = os.geteuid() == 0
    folder.chmod(0o555)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


# Orbax leaves futures of the failed write to a closed event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("trouble", [full_disk, read_only])
def test_a_checkpoint_that_cannot_be_written(trouble) -> None:
    said: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        outer, folder = Path(name), Path(name) / "checkpoints"
        outer.chmod(0o755)
        checkpoints = Checkpoints(folder, {}, keep=1, say=said.append)
        checkpoints.save(state(3), Cursor(0, 3))
        checkpoints.wait()
        assert not said
        with trouble(folder):
            checkpoints.save(state(6), Cursor(0, 6))
            checkpoints.wait()
        assert len(said) == 1, said
        assert "step 6 could not be written" in said[0]
        assert "the one of step 3 stays" in said[0]
        equal(checkpoints.restore(state(0))[0], state(3))
        checkpoints.save(state(9), Cursor(0, 9))
        checkpoints.wait()
        assert len(said) == 1
        assert checkpoints.latest == 9
        checkpoints.close()
        reopened = Checkpoints(folder, {}, keep=1)
        equal(reopened.restore(state(0))[0], state(9))
        reopened.close()
        assert [path.name for path in folder.iterdir()] == ["9"]


def test_settings_a_checkpoint_did_not_know_had_their_defaults() -> None:
    wanted = {"train.compute": "float32", "train.peak_lr": 1e-3, "draft.new": 1}
    assert differences({"train.peak_lr": 1e-3, "draft.new": 1}, wanted, 5) == []
    assert differences({"train.peak_lr": 1e-3, "draft.new": 1}, {**wanted, "train.compute": "bfloat16"}, 5) == [
        "train.compute: checkpoint 'float32', asked for 'bfloat16'"
    ]
    assert differences({"train.peak_lr": 1e-3}, wanted, 5) == ["draft.new: checkpoint None, asked for 1"]


def test_the_log_goes_on_where_the_checkpoint_is(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 8)) + '{"step": 8, "lo')
    log = JsonLines(path, resume_at=5)
    log.write({"step": 6, "again": True})
    log.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["again"]


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    """Sixty updates, a checkpoint every second one: whenever the process dies, the end is the same, bit for bit."""
    rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    script, cache, said = Path(__file__).with_name("killed_training.py"), tmp_path / "features", tmp_path / "output"
    features(cache)

    def start(folder: Path) -> subprocess.Popen:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(script.parent.parent)}
        # Compiled once, not in every process.
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        with said.open("wb") as output:
            return subprocess.Popen([sys.executable, script, cache, folder], env=environment, stdout=output, stderr=subprocess.STDOUT)

    def result(folder: Path) -> dict[str, np.ndarray]:
        with np.load(folder / "result.npz") as arrays:
            return dict(arrays)

    whole = start(tmp_path / "whole")
    assert whole.wait(timeout=300) == 0, said.read_text()
    want = result(tmp_path / "whole")
    kills = run = 0
    while kills < 20:
        folder = tmp_path / f"run{run}"
        process = start(folder)
        # A random number of updates of this process, then some milliseconds more.
        begun, updates, log = None, int(rng.integers(1, 9)), folder / "log.jsonl"
        while process.poll() is None:
            lines = log.read_text(encoding="utf-8").count("\n") if log.exists() else 0
            begun = lines if begun is None or lines < begun else begun
            if lines - begun >= updates:
                time.sleep(float(rng.uniform(0, 0.05)))
                break
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        assert process.returncode == 0, said.read_text()
        run += 1
    if not (folder / "result.npz").exists():
        last = start(folder)
        assert last.wait(timeout=300) == 0, said.read_text()
    for folder in tmp_path.glob("run*"):
        if (folder / "result.npz").exists():
            found = result(folder)
            assert found.keys() == want.keys()
            for name, value in want.items():
                np.testing.assert_array_equal(found[name], value, err_msg=f"{folder.name} {name}")
            steps = [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]
            assert steps == list(range(1, STEPS + 1))
