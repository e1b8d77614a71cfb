"""Norm, gate, bias and residual inside a product from panels: as apart, the same bits in every pass, the same gradients."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import tiny_target

from eagle3_jax.fused import gated_linear, linear_onto, norm_linear
from eagle3_jax.int8 import to_int8
from eagle3_jax.layout import laid_out
from eagle3_jax.native.build import panel_width
from eagle3_jax.panels import in_panels
from eagle3_jax.target import forward

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

ROWS, EPS = 60, 1e-5


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def forms(inputs, outputs):
    """Each fused form of (weight, its rows of the pass), with what else it reads in scales at which every part is seen."""
    x, parts, add = random(ROWS, inputs), 4 * random(ROWS, 2, inputs, seed=1), 3 * random(ROWS, outputs, seed=2)
    norm, bias = random(inputs, seed=3), random(outputs, seed=4)
    return {
        "norm": lambda w, at: norm_linear(7 * x[at], norm, EPS, w),
        "norm, bias": lambda w, at: norm_linear(x[at] / 50, norm, EPS, w, bias),
        "gate": lambda w, at: gated_linear(parts[at], w, add=add[at]),
        "gate, bias": lambda w, at: gated_linear(parts[at], w, bias, add=add[at]),
        "onto": lambda w, at: linear_onto(add[at], x[at], w),
        "onto, bias": lambda w, at: linear_onto(add[at], x[at], w, bias),
    }


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (37, 71), (200, 15), (577, 96)])
def test_as_apart_and_the_same_in_every_pass(inputs, outputs, small):
    plain = random(inputs, outputs, seed=5) / np.float32(np.sqrt(inputs))
    plain = to_int8(plain) if small else plain
    panels = in_panels(plain, panel_width())
    passes = {rows: slice(ROWS - rows, ROWS) for rows in (ROWS, 1, 2, 5, 13)}
    each = forms(inputs, outputs)
    want = jax.jit(lambda w: [form(w, passes[ROWS]) for form in each.values()])(plain)
    got = jax.jit(lambda w: [[form(w, at) for at in passes.values()] for form in each.values()])(panels)
    for name, apart, (every, *fewer) in zip(each, want, got, strict=True):
        np.testing.assert_allclose(every, apart, rtol=2e-5, atol=2e-5 * float(jnp.abs(apart).max()), err_msg=name)
        for some in fewer:
            assert np.array_equal(some, every[-len(some) :]), (name, len(some))


def test_gates_at_the_ends():
    """What overflows in an exponential, and what is not finite, comes out as from XLA."""
    gate = jnp.asarray([0.0, -0.0, 30, -30, 88, -86.9, -87.1, -104, 3e38, -3e38, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    inputs = len(gate)
    one = jnp.eye(inputs)
    for up in (1.0, -2.5):
        parts = jnp.zeros((inputs, 2, inputs)).at[jnp.arange(inputs), 0, jnp.arange(inputs)].set(gate).at[:, 1].set(up)
        want = jnp.diagonal(gated_linear(parts, one, add=jnp.zeros((inputs, inputs))))
        got = jnp.diagonal(gated_linear(parts, in_panels(one, panel_width()), add=jnp.zeros((inputs, inputs))))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-35)


def test_more_axes_and_transformations():
    """Batches, weights of several output axes, gradients of everything that has one, vmap."""
    x, parts, add = random(2, 3, 20), random(2, 3, 2, 20, seed=1), random(2, 3, 70, seed=2)
    w, norm, bias = random(20, 70, seed=3), random(20, seed=4), random(70, seed=5)
    panels = in_panels(w, panel_width())
    split = in_panels(w.reshape(20, 7, 10), panel_width())
    got = norm_linear(x, norm, EPS, split, bias.reshape(7, 10))
    np.testing.assert_allclose(got.reshape(2, 3, 70), norm_linear(x, norm, EPS, w, bias), rtol=1e-5, atol=1e-5)

    def loss(weight, x, parts, add, norm, bias):
        outputs = norm_linear(x, norm, EPS, weight, bias), gated_linear(parts, weight, bias, add=add), linear_onto(add, x, weight)
        return sum(jnp.sum(jnp.sin(y)) for y in outputs)

    every = (1, 2, 3, 4, 5)
    slopes = [jax.jit(jax.grad(loss, every))(weight, x, parts, add, norm, bias) for weight in (w, panels)]
    for want, slope in zip(*slopes, strict=True):
        np.testing.assert_allclose(slope, want, rtol=1e-4, atol=1e-4)
    mapped = jax.vmap(lambda x, parts, add: loss(panels, x, parts, add, norm, bias))(x, parts, add)
    np.testing.assert_allclose(mapped, [loss(panels, x[i], parts[i], add[i], norm, bias) for i in range(2)], rtol=1e-6)
    half = linear_onto(add.astype(jnp.bfloat16), x.astype(jnp.bfloat16), panels)
    assert half.dtype == jnp.bfloat16


def test_a_pass_is_made_of_few_operations():
    """Norms, gates and residuals of a target's blocks in panels are none of XLA's operations: no root, logistic or exponential."""
    target = laid_out(tiny_target(), "panels")
    cache, tokens = target.new_cache(1, 16), jnp.zeros((1, 3), jnp.int32)
    mask = jnp.tril(jnp.ones((1, 3, 3), bool))
    text = jax.jit(lambda target: forward(target, tokens, tokens, mask, cache).hidden).lower(target).as_text()
    assert text.count("rsqrt") == 1 and "logistic" not in text  # that of the last norm
