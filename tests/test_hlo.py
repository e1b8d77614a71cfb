"""Counting a compiled program's products and traffic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eagle3_jax.pods.hlo import collective_shapes, cost
from eagle3_jax.sharding import make_mesh


def test_a_loop_counts_as_often_as_it_runs():
    """Five products of [6, 16] with [16, 16] in a scan, whose body XLA's own analysis counts once, and one behind it."""
    w, x = jnp.ones((5, 16, 16)), jnp.ones((6, 16))

    def program(x, w):
        out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return out @ jnp.ones((16, 3))

    counted = cost(jax.jit(program).lower(x, w).compile().as_text())
    assert counted.flops == 5 * 2 * 6 * 16 * 16 + 2 * 6 * 16 * 3
    assert counted.unknown_loops == 0
    assert counted.collectives == {}


def test_traffic_by_kind():
    """A product over a split axis, twice: its parts are summed over the devices, an array of 4 rows x 8 float32 each."""
    mesh = make_mesh(tensor=8)
    x = jax.ShapeDtypeStruct((4, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "tensor")))
    w = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("tensor")))

    @jax.jit
    def program(x, w):
        y, _ = jax.lax.scan(lambda carry, _: (jnp.tanh(carry + x @ w), None), jnp.zeros((4, 8)), None, length=2)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, PartitionSpec()))

    text = program.lower(x, w).compile().as_text()
    counted = cost(text)
    assert counted.flops in (2 * 2 * 4 * 8 * 16 / 8, 2 * 4 * 8 * 16 / 8)  # the second where XLA moves the product out of the loop
    assert set(counted.collectives) == {"all-reduce"}
    traffic = counted.collectives["all-reduce"]
    assert traffic.bytes == traffic.count * 4 * 8 * 4
    assert ("all-reduce", (4, 8)) in collective_shapes(text)


BATCHED = """HloModule m

%fused (p: bf16[8,16,32], q: bf16[8,64,32]) -> bf16[8,16,64] {
  %p = bf16[8,16,32]{2,1,0} parameter(0)
  %q = bf16[8,64,32]{2,1,0} parameter(1)
  ROOT %c = bf16[8,16,64]{2,1,0} convolution(%p, %q), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf
}

ENTRY %main (a: bf16[8,16,32], b: bf16[8,64,32]) -> bf16[8,16,64] {
  %a = bf16[8,16,32]{2,1,0} parameter(0)
  %b = bf16[8,64,32]{2,1,0} parameter(1)
  %g = (bf16[2,32]{1,0}, bf16[16,32]{1,0}) all-gather-start(%a), dimensions={0}
  %d = bf16[16,32]{1,0} all-gather-done(%g)
  ROOT %f = bf16[8,16,64]{2,1,0} fusion(%a, %b), kind=kOutput, calls=%fused
}
"""


def test_a_batched_product_written_as_a_convolution():
    """TPUs write the batch as a window of which one place fits: 8 products of [16, 32] with [32, 64], not 64."""
    counted = cost(BATCHED)
    assert counted.flops == 8 * 2 * 16 * 32 * 64
    assert counted.collectives["all-gather"].count == 1


COUNTED = """HloModule m

%body (t: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %t = (s32[], f32[4,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4,4]{1,0} get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[4,4]{1,0} convolution(%x, %x), dim_labels=bf_io->bf
  ROOT %out = (s32[], f32[4,4]{1,0}) tuple(%next, %y)
}

%condition (t: (s32[], f32[4,4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(10)
  %t = (s32[], f32[4,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %c = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (a: f32[4,4]) -> (s32[], f32[4,4]) {
  %a = f32[4,4]{1,0} parameter(0)
  %start = s32[] constant(2)
  %copied = s32[] copy(%start)
  %tuple = (s32[], f32[4,4]{1,0}) tuple(%copied, %a)
  ROOT %loop = (s32[], f32[4,4]{1,0}) while(%tuple), condition=%condition, body=%body
}
"""


def test_a_loop_whose_count_stands_in_its_condition():
    """From 2 to 10: eight products of [4, 4] with [4, 4], by steps of three three. With another condition it is counted once, and said to
    be unknown."""
    assert cost(COUNTED).flops == 8 * 2 * 4 * 4 * 4
    assert cost(COUNTED.replace("%one = s32[] constant(1)", "%one = s32[] constant(3)")).flops == 3 * 2 * 4 * 4 * 4
    unknown = cost(COUNTED.replace("direction=LT", "direction=NE"))
    assert (unknown.flops, unknown.unknown_loops) == (2 * 4 * 4 * 4, 1)


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        cost("HloModule nothing")
