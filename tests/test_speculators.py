"""The `speculators` package reads what is written here and gives the same logits; what it writes is read here.

It needs torch and lives in an environment of its own: EAGLE3_SPECULATORS_PYTHON names that environment's interpreter.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreign_python import foreign_python
from test_weights_dialects import assert_same
from test_weights_heads import make_head
from tiny_checkpoints import BASE, tensors_of, write_folder

from eagle3_jax import draft as draft_model
from eagle3_jax.config import RopeConfig
from eagle3_jax.training.ttt import Batch, unroll
from eagle3_jax.weights import load_head, load_target, save_head

SCRIPT = Path(__file__).parent / "speculators_logits.py"
LLAMA3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "taps": (1, 3, 6)},
    "one norm before fc": {"norm_before_fc": True, "rope": LLAMA3},
    "own embedding": {"own_embedding": True, "rope": RopeConfig(theta=300.0, kind="linear", factor=2.0)},
}


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter that can import speculators; skips without one."""
    return foreign_python("speculators")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**BASE, "num_hidden_layers": 8}
    return write_folder(tmp_path_factory.mktemp("target"), config, tensors_of(config))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_and_the_same_head_back(case: str, python: str, folder: Path, tmp_path: Path):
    target = load_target(folder)
    kept = list(range(3, 96, 4))
    head = make_head(kept, target.config, **CASES[case])
    kept_along = {"dialect": "speculators", "target_name": str(folder), "embedding": target.embed[...]}
    written = save_head(head, tmp_path / "head", dtype="float32", **kept_along)
    T, random = 12, np.random.default_rng(2)
    features = random.normal(size=(T, 3 * target.config.hidden_size)).astype(np.float32)
    tokens = random.integers(0, 96, T).astype(np.int32)
    numbers, saved = tmp_path / "numbers.npz", tmp_path / "saved"
    np.savez(numbers, features=features, tokens=tokens)
    done = subprocess.run([python, SCRIPT, written, numbers, saved], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    # Their token i is the one that slot i reads, ours the one whose feature it has.
    index = jnp.arange(T + 1, dtype=jnp.int32)[None]
    ours = Batch(
        tokens=jnp.asarray(np.concatenate([[0], tokens]), jnp.int32)[None],
        positions=index,
        features=jnp.asarray(np.concatenate([features, features[:1]]))[None],
        hidden=None,
        argmax=None,
        response=jnp.ones_like(index),
        segments=jnp.ones_like(index),
        valid=jnp.ones(index.shape, bool),
        slots=index,
    )
    read = load_head(written, target)
    embed = draft_model.table(read, target.embed[...])
    states = jax.jit(lambda draft: unroll(draft, embed, ours, 2, lambda x: x))(read)
    mine, theirs = np.asarray(draft_model.logits(head, states))[:, 0, :T], np.load(numbers)["logits"]
    # Behind the end both read token 0.
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4 * float(np.abs(theirs).max()))
    back = load_head(saved, target)
    assert_same(back, read)
