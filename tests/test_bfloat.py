"""Products of bfloat16 by the processor's own instruction: what they give, their gradients, and when they are taken."""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax import bfloat
from eagle3_jax.layers import linear
from eagle3_jax.native.build import COMPILERS, available, has_bfloat
from eagle3_jax.target import best_token

needs_instruction = pytest.mark.skipif(
    not (available() and has_bfloat()), reason="this machine's processor or compiler knows no bfloat16 product"
)


def test_this_processor() -> None:
    """Where the system says that there is the instruction, and there is a compiler, nothing below may be skipped."""
    about = Path("/proc/cpuinfo")
    if not about.exists() or "avx512_bf16" not in about.read_text() or not any(map(shutil.which, COMPILERS)):
        pytest.skip("no such instruction, or no compiler")
    assert has_bfloat()


KINDS = tuple(bfloat._AXES)


def numbers(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def stored(kind: str, rows: int, inputs: int, outputs: int) -> tuple[jax.Array, jax.Array]:
    """a and b as the custom call of this kind takes them."""
    first, second = bfloat._AXES[kind]
    return (
        numbers(1, *((inputs, rows) if first == 0 else (rows, inputs))),
        numbers(2, *((outputs, inputs) if second == 1 else (inputs, outputs))),
    )


def exact(kind: str, a: jax.Array, b: jax.Array) -> np.ndarray:
    first, second = bfloat._AXES[kind]
    return np.tensordot(np.asarray(a, np.float64), np.asarray(b, np.float64), axes=((first,), (second,)))


@needs_instruction
@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(KINDS), rows=st.integers(1, 40), inputs=st.integers(1, 70), outputs=st.integers(1, 70))
def test_any_shape(kind: str, rows: int, inputs: int, outputs: int) -> None:
    """Tails of tiles, panels, pairs and vectors."""
    a, b = stored(kind, rows, inputs, outputs)
    got = bfloat._call(kind, jnp.float32, a, b)
    np.testing.assert_allclose(got, exact(kind, a, b), atol=2e-5 * np.sqrt(inputs), rtol=0)
    np.testing.assert_array_equal(bfloat._call(kind, jnp.bfloat16, a, b), got.astype(jnp.bfloat16))  # rounded once


@needs_instruction
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_any_company(kind: str) -> None:
    a, b = stored(kind, 75, 130, 67)
    together = np.asarray(bfloat._call(kind, jnp.float32, a, b))
    for first, count in ((0, 1), (13, 2), (40, 35)):
        some = a[:, first : first + count] if bfloat._AXES[kind][0] == 0 else a[first : first + count]
        np.testing.assert_array_equal(bfloat._call(kind, jnp.float32, some, b), together[first : first + count])


@needs_instruction
def test_empty_and_not_finite() -> None:
    assert bfloat._call("", jnp.float32, jnp.zeros((0, 4), jnp.bfloat16), jnp.zeros((4, 3), jnp.bfloat16)).shape == (0, 3)
    np.testing.assert_array_equal(bfloat._call("", jnp.float32, jnp.zeros((2, 0), jnp.bfloat16), jnp.zeros((0, 3), jnp.bfloat16)), 0)
    x = numbers(0, 40, 8).at[3, 2].set(jnp.inf).at[5, 1].set(jnp.nan)
    y = np.asarray(bfloat._call("", jnp.float32, x, jnp.ones((8, 5), jnp.bfloat16)))
    assert np.isinf(y[3]).all() and np.isnan(y[5]).all() and np.isfinite(np.delete(y, [3, 5], axis=0)).all()


@needs_instruction
@pytest.mark.parametrize("turned", [False, True])
def test_gradients(turned: bool) -> None:
    x, w = numbers(3, 48, 20), numbers(4, *((33, 20) if turned else (20, 33)))
    weight = numbers(5, 48, 33).astype(jnp.float32)
    ours = partial(bfloat.product, result=jnp.float32, turned=turned)
    plain = lambda x, w: jnp.dot(x, w.T if turned else w, preferred_element_type=jnp.float32)  # noqa: E731
    got, want = (jax.grad(lambda x, w, f=f: jnp.sum(f(x, w) * weight), argnums=(0, 1))(x, w) for f in (ours, plain))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2**-7, atol=2e-2)


@needs_instruction
def test_when_it_is_taken() -> None:
    few, many, w = numbers(0, bfloat.FEWEST - 1, 8), numbers(0, 2, bfloat.FEWEST, 8), numbers(1, 8, 3, 2)
    text = lambda x, w: jax.jit(linear).lower(x, w).as_text()  # noqa: E731
    assert bfloat.BFLOAT in text(many, w)
    for x, weight in ((few, w), (many.astype(jnp.float32), w.astype(jnp.float32))):
        assert bfloat.BFLOAT not in text(x, weight)
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        assert bfloat.BFLOAT not in text(many, w)
    got = linear(many, w, result=jnp.float32)
    np.testing.assert_allclose(got, exact("", many.reshape(-1, 8), w.reshape(8, -1)).reshape(got.shape), atol=1e-5)


@needs_instruction
def test_kept_for_the_backward_pass() -> None:
    """Under the training step's policy the forward product is not made again."""
    policy = jax.checkpoint_policies.save_only_these_names(bfloat.NAME)
    layer = lambda x, w: jnp.sum(jnp.tanh(bfloat.product(x, w, jnp.float32)))  # noqa: E731
    x, w = numbers(0, 40, 8), numbers(1, 8, 8)
    calls = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(x, w).as_text().count("stablehlo.custom_call @eagle3_bfloat(")  # noqa: E731
    assert calls(jax.checkpoint(layer)) == 2
    assert calls(jax.checkpoint(layer, policy=policy)) == calls(layer) == 1


@needs_instruction
@settings(max_examples=12, deadline=None)
@given(turned=st.booleans(), rows=st.integers(1, 30), inputs=st.integers(1, 40), outputs=st.integers(1, 1200))
def test_best(turned: bool, rows: int, inputs: int, outputs: int) -> None:
    """Whole numbers, so that sums are exact and ties many."""
    draw = np.random.default_rng(outputs)
    x, w = (jnp.asarray(draw.integers(-2, 3, shape), jnp.bfloat16) for shape in ((rows, inputs), (inputs, outputs)))
    scores = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_array_equal(bfloat.best(x, w.T if turned else w, turned=turned), scores.argmax(-1))


@pytest.mark.parametrize("tied", [False, True])
def test_best_token_in_bfloat16(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the instruction or without, then by parts of the vocabulary, the last one overlapping: the argmax of float32 sums."""
    from eagle3_jax import target as target_model
    from eagle3_jax.params import initialize
    from eagle3_jax.shapes import LLAMA_31_8B

    monkeypatch.setattr(target_model, "PART", 16)
    sizes = dataclasses.replace(
        LLAMA_31_8B, vocab_size=50, hidden_size=12, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=12
    )
    target = initialize(target_model.Target(dataclasses.replace(sizes, tie_embeddings=tied)), jax.random.key(0), jnp.bfloat16)
    hidden = numbers(7, 3, 20, 12)
    scores = np.asarray(hidden, np.float64) @ np.asarray(target_model.output_head(target), np.float64)
    np.testing.assert_array_equal(best_token(target, hidden), scores.argmax(-1))
