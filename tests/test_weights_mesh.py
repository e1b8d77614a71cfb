"""Targets loaded straight onto a mesh: the same weights, each where the mesh wants it, and never a whole copy on the way."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from test_weights_gguf import write
from test_weights_target import shard
from tiny_checkpoints import BASE, config_of, tensors_of, write_folder

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.decoding.decode import Request, cycle
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import count_parameters, named_variables
from eagle3_jax.pods.tpu_plan import abstract_decoding
from eagle3_jax.sharding import make_mesh, module_specs, on_mesh_of
from eagle3_jax.target import Target
from eagle3_jax.tree import Tree
from eagle3_jax.weights import load_target
from eagle3_jax.weights.hf_target import hf_rows
from eagle3_jax.weights.tensor_files import TensorFiles

EVEN = BASE | {"hidden_size": 64, "intermediate_size": 96}


def assert_on_mesh(target: Target, alone: Target, mesh: Any) -> None:
    specs, want = module_specs(alone, mesh), dict(named_variables(alone))
    for path, variable in named_variables(target):
        value = variable.get_value()
        assert value.sharding == NamedSharding(mesh, specs[path]), path
        assert value.dtype == want[path].get_value().dtype
        np.testing.assert_array_equal(np.asarray(value), np.asarray(want[path].get_value()), err_msg=path)
    assert any(not variable.get_value().sharding.is_fully_replicated for _, variable in named_variables(target))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["biases_one_kv_head_tied", "qwen3_biases_window_by_layer"])
def test_a_folder_on_a_mesh(case: str, dtype: str, tmp_path: Path):
    mesh = make_mesh(fsdp=8) if config_of(case)["num_key_value_heads"] == 1 else make_mesh(data=2, fsdp=2, tensor=2)
    folder = write_folder(tmp_path, config_of(case), tensors_of(config_of(case)))
    shard(folder, tensors_of(config_of(case)))
    assert_on_mesh(load_target(folder, dtype, mesh), load_target(folder, dtype), mesh)


def test_a_gguf_file_on_a_mesh(tmp_path: Path):
    mesh, path = make_mesh(fsdp=4, tensor=2), write(tmp_path / "model.gguf", EVEN)
    assert_on_mesh(load_target(path, mesh=mesh), load_target(path), mesh)


def test_heads_that_the_mesh_cannot_split_are_said(tmp_path: Path):
    folder = write_folder(tmp_path, EVEN, tensors_of(EVEN))
    with pytest.warns(UserWarning, match="tensor=8 does not divide the 2 key/value heads of Target"):
        load_target(folder, mesh=make_mesh(tensor=8))


def test_nothing_is_whole_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """When a tensor is read, no other tensor of the file is alive, and every array that JAX holds by then lies on the mesh."""
    mesh, folder = make_mesh(fsdp=4, tensor=2), write_folder(tmp_path, EVEN, tensors_of(EVEN))
    held = jax.live_arrays()  # while they are held, no new array gets the identity of an old one
    before = {id(array) for array in held}
    alive: list[weakref.ref] = []
    read, seen = TensorFiles.read, []

    def watched(self: TensorFiles, key: str) -> np.ndarray:
        assert not [ref for ref in alive if ref() is not None], key
        seen.extend(array.sharding for array in jax.live_arrays() if id(array) not in before)
        # A view can be watched and dies with its last user.
        array = read(self, key).copy()
        alive.append(weakref.ref(array))
        return array

    monkeypatch.setattr(TensorFiles, "read", watched)
    load_target(folder, mesh=mesh)
    assert len(alive) == len(tensors_of(EVEN))
    assert len(seen) > 20
    assert all(sharding.mesh == mesh for sharding in seen)


LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}


@pytest.mark.parametrize(("raw", "parameters"), [(LLAMA_8B, 8_030_261_248), (LLAMA_70B, 70_553_706_496)], ids=["8B", "70B"])
def test_large_targets_by_their_shapes(raw: dict[str, Any], parameters: int):
    """The published number of parameters, a row of the table for each tensor, and an eighth of all but the norms on each device."""
    config = TargetConfig.from_hf(raw)
    target = Target(config)
    assert count_parameters(target) == parameters
    assert len(hf_rows(config)) == 3 + 9 * config.num_layers
    shapes = {path: variable.get_value().shape for path, variable in named_variables(target)}
    norms = (2 * config.num_layers + 1) * config.hidden_size
    for axes in ({"fsdp": 8}, {"tensor": 8}, {"fsdp": 2, "tensor": 4}):
        mesh = make_mesh(**axes)
        specs = module_specs(target, mesh)
        each = sum(math.prod(NamedSharding(mesh, specs[path]).shard_shape(shape)) for path, shape in shapes.items())
        assert each == (parameters - norms) // 8 + norms, axes


@pytest.mark.parametrize("raw", [LLAMA_8B, pytest.param(LLAMA_70B, marks=pytest.mark.slow)], ids=["8B", "70B"])
def test_large_targets_lower_onto_a_mesh(raw: dict[str, Any]):
    """A cycle of such a target and a head, from shapes alone: a program for eight devices, and caches of the size that went in."""
    config, mesh = TargetConfig.from_hf(raw), make_mesh(fsdp=2, tensor=4)
    head = DraftConfig.for_target(config, 32000)
    state, arguments, decoding = abstract_decoding(config, head, Tree(nodes=8, depth=3, width=3), 2, 1024, mesh, sampled=False)

    def one(target: Target, draft: Eagle3Draft, request: Request, state: Any) -> Any:
        with on_mesh_of(target):
            return cycle(target, draft, request, decoding, state)

    lowered = jax.jit(one).lower(*arguments, state)
    assert "num_partitions = 8" in lowered.as_text()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), lowered.out_info) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


PEAK = """
import json, os, sys, threading
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from eagle3_jax.sharding import make_mesh
from eagle3_jax.weights import load_target

def resident():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1]) * 1024

mesh = make_mesh(fsdp=8) if sys.argv[2] == "mesh" else None
jax.block_until_ready(jax.device_put(0.0))
start, peak, done = resident(), [0], threading.Event()

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], resident())
        done.wait(0.0005)

thread = threading.Thread(target=watch)
thread.start()
target = load_target(sys.argv[1], mesh=mesh)
jax.block_until_ready(jax.tree.leaves(target))
done.set()
thread.join()
print(json.dumps({"peak": peak[0] - start, "weights": sum(x.nbytes for x in jax.tree.leaves(target))}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["mesh", "one device"])
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the resident set from /proc")
def test_peak_memory_is_the_weights_and_a_shard(where: str, tmp_path: Path):
    """In a process of its own: at most 1.2 times the largest shard above the weights."""
    config = BASE | {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    folder = write_folder(tmp_path, config, tensors_of(config))
    shard(folder, tensors_of(config))
    largest = max(path.stat().st_size for path in folder.glob("model-*.safetensors"))
    done = subprocess.run([sys.executable, "-c", PEAK, str(folder), where], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(where, "in MiB:", {name: size >> 20 for name, size in (found | {"largest shard": largest}).items()})
    assert found["peak"] <= found["weights"] + 1.2 * largest


def test_mesh_is_no_more_than_a_place(tmp_path: Path):
    """The tokens of a causal pass on the mesh and on one device."""
    from eagle3_jax import target as target_module
    from eagle3_jax.attention import causal_mask

    folder = write_folder(tmp_path, EVEN, tensors_of(EVEN))

    @jax.jit
    def logits(target: Target, tokens_BT: jax.Array) -> jax.Array:
        with on_mesh_of(target):
            positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), tokens_BT.shape)
            return target_module.logits(target, target_module.forward(target, tokens_BT, positions, causal_mask(8)).hidden)

    tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    on_mesh = logits(load_target(folder, mesh=make_mesh(fsdp=4, tensor=2)), tokens)
    np.testing.assert_allclose(np.asarray(on_mesh), logits(load_target(folder), tokens), atol=1e-5)
