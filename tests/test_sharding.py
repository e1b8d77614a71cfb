"""The mesh: its shapes and errors, and that programs on it do what they do on one device, without gathering the vocabulary."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny_models import tiny_draft, tiny_target

from eagle3_jax.decoding.decode import run
from eagle3_jax.decoding.generate import generate, prepare
from eagle3_jax.decoding.stream import stream
from eagle3_jax.drafting import top_candidates
from eagle3_jax.pods.hlo import collective_shapes
from eagle3_jax.sharding import constrain, lookup, make_mesh, module_specs, on_mesh_of, parse_mesh, place, put
from eagle3_jax.tree import Chain, Tree

V, U = 104, 40
PROMPTS = [[5, 9, 2, 31, 17, 40, 8], [11], [int(x) for x in np.random.default_rng(3).integers(1, V, 12)], [7, 7, 7]]


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=V, num_kv_heads=2)


@pytest.fixture(scope="module")
def draft(target):
    return tiny_draft(target, draft_vocab_size=U)


def test_a_mesh_must_take_all_devices():
    assert dict(make_mesh(data=2, fsdp=2, tensor=2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    with pytest.raises(ValueError, match="mesh data 3 x fsdp 1 x tensor 1 takes 3 devices, but there are 8"):
        make_mesh(data=3)
    with pytest.raises(ValueError, match="mesh axis fsdp must be a whole number >= 1, found 0"):
        make_mesh(fsdp=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [("data=2,model=4", "unknown axis 'model'"), ("data=2,data=4", "named twice"), ("fsdp", "found ''"), ("fsdp=-1", "found '-1'")],
)
def test_a_mesh_on_the_command_line(text: str, message: str):
    assert parse_mesh("data=2, tensor=4") == {"data": 2, "tensor": 4}
    with pytest.raises(ValueError, match=message):
        parse_mesh(text)


def test_every_parameter_has_its_place(target, draft):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    specs = module_specs(target, mesh)
    assert specs["embed"] == PartitionSpec("tensor", "fsdp")
    assert specs["blocks.0.qkv"] == PartitionSpec("fsdp", "tensor", None, None)
    assert specs["blocks.1.down"] == PartitionSpec("tensor", "fsdp")
    assert specs["norm"] == PartitionSpec(None)
    specs = module_specs(draft, mesh)
    assert specs["fc"] == PartitionSpec(None, "fsdp")
    assert specs["head"] == PartitionSpec("fsdp", "tensor")
    assert specs["d2t"] == PartitionSpec(None)
    placed = place(target, mesh)
    assert placed.blocks[0].down[...].addressable_shards[0].data.shape == (24, 16)
    with pytest.raises(ValueError, match="made by make_mesh"):
        place(target, jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)))


def test_heads_are_split_whole_or_not_at_all(target):
    """Two key/value heads on four devices: half a head each would be divisible, and wrong to want."""
    mesh = make_mesh(data=2, tensor=4)
    with pytest.warns(UserWarning, match="tensor=4 does not divide the 2 key/value heads of Target"):
        place(target, mesh)
    specs = module_specs(target, mesh)
    assert specs["blocks.0.o"] == PartitionSpec(None, None)
    assert specs["blocks.0.gate_up"] == PartitionSpec(None, None, "tensor")


def test_constraints_mean_nothing_without_a_mesh():
    x = jnp.ones((4, 2))
    assert constrain(x, "rows", "vocab") is x


@pytest.mark.parametrize("rows", [8, 3])
def test_a_split_table_is_read_without_moving_it(target, rows: int):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (rows, 5)).astype(np.int32))
    for shape in ((2, 2, 2), (1, 8, 1), (1, 1, 8)):
        placed = place_quietly(target, make_mesh(*shape))

        @jax.jit
        def read(target, tokens):
            with on_mesh_of(target):
                return lookup(target.embed[...], tokens)

        np.testing.assert_array_equal(read(placed, tokens), target.embed[...][tokens])
        assert not vocabulary_in_collectives(read.lower(placed, tokens).compile().as_text(), (V, V // shape[2]))


def place_quietly(module, mesh):
    """`place` where the tensor axis is wider than the heads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return place(module, mesh)


def test_the_best_of_a_split_vocabulary(target):
    """The same candidates, in the same order where scores tie, as `lax.top_k` over the whole."""
    scores = jnp.asarray(np.random.default_rng(0).integers(0, 6, (4, 3, U)).astype(np.float32))
    want = jax.lax.top_k(scores, 3)
    for shape in (dict(data=1, tensor=8), dict(data=4, tensor=2)):
        mesh = make_mesh(**shape)

        @jax.jit
        def best(x):
            with on_mesh_of(x):
                return top_candidates(x, 3)

        placed = put(scores, jax.sharding.NamedSharding(mesh, PartitionSpec("data", None, "tensor")))
        jax.tree.map(np.testing.assert_array_equal, best(placed), tuple(want))
        assert not vocabulary_in_collectives(best.lower(placed).compile().as_text(), (U,))


MESHES = {
    "data 2 x fsdp 2 x tensor 2": dict(data=2, fsdp=2, tensor=2),
    "tensor 8": dict(tensor=8),
    "data 4 x tensor 2": dict(data=4, tensor=2),
}
SLOWER = [pytest.param(name, marks=pytest.mark.slow) if name.startswith(("tensor", "data 4")) else name for name in MESHES]
SETTINGS = {
    "chain": dict(tree=Chain(3), temperature=[0.0, 0.7, 1.0, 0.9], top_k=[0, 0, 9, 0], top_p=[1.0, 0.8, 1.0, 0.9]),
    "tree": dict(tree=Tree(nodes=8, depth=3, width=3)),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mesh", SLOWER)
def test_decoding_on_a_mesh_gives_the_same_tokens(target, draft, mesh: str, setting: str):
    """And moves no array as long as the vocabulary, or the draft's, between devices."""
    options = dict(max_new_tokens=16, eos_token_ids=[], **SETTINGS[setting])
    plain = generate(target, draft, PROMPTS, **options)
    shape = make_mesh(**MESHES[mesh])
    placed = place_quietly(target, shape), place_quietly(draft, shape)
    out = generate(*placed, PROMPTS, **options)
    assert out.tokens == plain.tokens
    assert out.accept_lengths == plain.accept_lengths
    request, config = prepare(target, draft, PROMPTS, **options)
    assert not vocabulary_in_collectives(run.lower(*placed, request, config).compile().as_text(), (V, U))


@pytest.mark.slow
@pytest.mark.parametrize("tree", [Chain(3), Tree(nodes=8, depth=3, width=3)], ids=str)
def test_stops_and_limits_on_a_mesh_and_in_a_stream_there(target, draft, tree):
    """A stop id inside a block, one that is the first token, limits of 2 and 0: as every prompt alone on one device, decoded plainly."""
    alone = [generate(target, None, [prompt], 16, eos_token_ids=[]).tokens[0] for prompt in PROMPTS]
    stops, limits = [[alone[0][4]], [alone[1][0]], [], []], [16, 16, 2, 0]
    want = [alone[0][: alone[0].index(alone[0][4]) + 1], alone[1][:1], alone[2][:2], []]
    shape = make_mesh(**MESHES["data 2 x fsdp 2 x tensor 2"])
    placed = place_quietly(target, shape), place_quietly(draft, shape)
    for out in (
        generate(*placed, PROMPTS, limits, tree=tree, eos_token_ids=stops),
        stream(*placed, PROMPTS, limits, tree=tree, eos_token_ids=stops, cycles=2).finish(),
    ):
        assert out.tokens == want
        assert out.finish_reasons == ["stop", "stop", "length", "length"]
        assert [sum(kept) for kept in out.accept_lengths] == [len(want[0]) - 1, 0, 1, 0]


def vocabulary_in_collectives(hlo: str, sizes: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Arrays with a dimension of these sizes that a compiled program moves between devices."""
    return [(kind, dims) for kind, dims in collective_shapes(hlo) if set(dims) & set(sizes)]
