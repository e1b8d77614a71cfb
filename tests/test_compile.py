"""Programs traced at the real shapes of LLaMA-3.1-8B, without weights: what they hold and what they must not."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from eagle3_jax import target as target_model
from eagle3_jax.attention import causal_mask
from eagle3_jax.cache import Cache, append
from eagle3_jax.config import DraftConfig
from eagle3_jax.decoding.decode import DecodeConfig, Request, run
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import count_parameters, named_variables
from eagle3_jax.sampling import Sampling
from eagle3_jax.shapes import LLAMA_31_8B
from eagle3_jax.target import Target
from eagle3_jax.tree import Tree

SLOTS = 2000
"""Divides nothing else in these programs, so that an array of this length can only belong to a cache."""


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def cast(module: nnx.Module, dtype: Any) -> Any:
    """The abstract module with every float32 parameter in another type."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype if x.dtype == jnp.float32 else x.dtype), module)


def arrays_in(text: str) -> set[tuple[tuple[int, ...], str]]:
    """(shape, element type) of every array that a lowered program mentions."""
    found = re.findall(r"tensor<((?:\d+x)+)([a-z]+\d+)>", text)
    return {(tuple(int(n) for n in shape.split("x")[:-1]), dtype) for shape, dtype in found}


def decode_step(target: Target, tokens: jax.Array, positions: jax.Array, cache: Cache):
    """One plain decoding step: hidden states, features, and the cache with the new rows."""
    T = tokens.shape[1]
    out = target_model.forward(target, tokens, positions, causal_mask(T), cache, taps=(2, 16, 29))
    return out.hidden, out.features, append(cache, out.kv, None, jnp.ones((tokens.shape[0],), jnp.int32))


def test_parameter_counts():
    """The model card's 8.03 billion, and the 0.42 billion trainable ones of the published head."""
    assert count_parameters(Target(LLAMA_31_8B)) == pytest.approx(8.030e9, rel=1e-3)
    head = Eagle3Draft(DraftConfig.for_target(LLAMA_31_8B, draft_vocab_size=32000))
    assert count_parameters(head) == pytest.approx(425e6, rel=2e-3)
    shapes = {name: v.get_value().shape for name, v in named_variables(head)}
    assert shapes["fc"] == (3 * 4096, 4096)
    assert shapes["q"] == (8192, 4096)
    assert shapes["head"] == (4096, 32000)


@pytest.mark.parametrize("tokens", [1, 61])
def test_one_pass_at_8b(tokens: int):
    """bfloat16: no vocabulary-sized array beyond the weights, nothing large in float32, no kv head repeated for its queries."""
    target = cast(Target(LLAMA_31_8B), jnp.bfloat16)
    cache = jax.eval_shape(lambda: target.new_cache(1, SLOTS))
    lowered = jax.jit(decode_step, donate_argnums=3).lower(target, ints(1, tokens), ints(1, tokens), cache)
    arrays = arrays_in(lowered.as_text())
    parameters = {v.get_value().size for _, v in named_variables(target)}  # sizes: a weight is also read as a matrix
    assert ((128256, 4096), "bf16") in arrays

    beyond = {(shape, dtype) for shape, dtype in arrays if math.prod(shape) not in parameters}
    assert not [a for a in beyond if 128256 in a[0]], "a logits-sized array in a pass that was asked for none"
    # Scores over the cache, [1, K, N/K, T, S] in float32, are the largest thing that may arise.
    most = 32 * tokens * SLOTS
    upcast = [(shape, dtype) for shape, dtype in arrays if dtype == "f32" and math.prod(shape) > max(most, tokens * 14336)]
    assert not upcast, "weights or cache in float32"
    kv = 8 * 128 * SLOTS
    assert not [a for a in beyond if math.prod(a[0]) > max(kv, most)], "keys or values repeated for every query head"
    hidden, features, after = lowered.out_info
    assert hidden.shape == (1, tokens, 4096)
    assert features.shape == (1, tokens, 3 * 4096)
    assert features.dtype == jnp.bfloat16
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)


def test_nothing_in_a_long_prompt_is_square_in_the_vocabulary():
    """A prefill of 1,024 tokens by blocks of queries: scores stay a tile of 128 queries, and logits are for whom they are asked."""
    target = cast(Target(dataclasses.replace(LLAMA_31_8B, num_layers=2)), jnp.bfloat16)

    def prefill(target: Target, tokens: jax.Array, positions: jax.Array):
        out = target_model.forward(target, tokens, positions, None, taps=(0, 1))
        return target_model.logits(target, out.hidden[:, -1])

    arrays = arrays_in(jax.jit(prefill).lower(target, ints(1, 1024), ints(1, 1024)).as_text())
    assert ((1, 128256), "f32") in arrays
    assert not [a for a in arrays if 128256 in a[0] and 1024 in a[0]]
    # The feed-forward layer's numbers, elementwise in float32, are no scores.
    largest = max(math.prod(shape) for shape, dtype in arrays if dtype == "f32" and 14336 not in shape)
    assert largest <= 32 * 128 * 1024, "float32 scores of more than one tile"


SMALL = dataclasses.replace(
    LLAMA_31_8B, vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)


def request(batch: int) -> Request:
    sampling = Sampling(temperature=floats(batch), top_k=ints(batch), top_p=floats(batch), seeds=ints(batch))
    return Request(ints(batch, 16), ints(batch), ints(batch), ints(batch, 1), sampling)


@pytest.mark.parametrize("tree", [None, Tree(nodes=4, depth=3, width=1)], ids=["plain", "chain"])
def test_the_decode_loop_copies_no_cache(tree: Tree | None):
    """Both caches are updated in place in the loop: the compiled program has no copy of an array of their shapes inside it.

    The cache is large beside everything else a cycle touches but the weights; two silent copies a cycle would cost a tenth of the speed.
    """
    target = Target(SMALL)
    draft = None if tree is None else Eagle3Draft(DraftConfig.for_target(SMALL, draft_vocab_size=128, taps=(0, 1), num_kv_heads=1))
    config = DecodeConfig(tree=tree, slots=SLOTS, max_new=32)
    text = run.lower(target, draft, request(1), config).compile().as_text()
    assert f"f32[1,2,16,{SLOTS}]" in text, "the test looks for the wrong shape"
    assert tree is None or f"f32[1,1,16,{SLOTS}]" in text
    copies = re.findall(rf"= f32\[1,[12],(?:16,{SLOTS}|{SLOTS},16)\]\S* copy\(", text)
    assert not copies
