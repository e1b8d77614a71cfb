"""Programs compiled for TPUs that are not here."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path

import pytest
from command_scripts import load_script, run_script

from eagle3_jax.config import DraftConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import count_parameters
from eagle3_jax.pods.topology import GIB, Chip, topology_devices
from eagle3_jax.pods.tpu_plan import decoding_plan, decoding_shape, plan_table, training_plan, training_shape
from eagle3_jax.shapes import LLAMA_31_8B, target_shape
from eagle3_jax.sharding import make_mesh
from eagle3_jax.target import Target
from eagle3_jax.training.trainer import TrainConfig
from eagle3_jax.training.ttt import recipe
from eagle3_jax.tree import Chain

CPU = Chip("CPU", GIB)
SMALL = dataclasses.replace(
    LLAMA_31_8B, vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16
)


@pytest.fixture(scope="module")
def libtpu() -> str | None:
    """The folder that holds the package libtpu ($EAGLE3_LIBTPU), None where it is installed; skips without it."""
    folder = os.environ.get("EAGLE3_LIBTPU")
    if folder is None and importlib.util.find_spec("libtpu") is None:
        pytest.skip("no libtpu: pip install --target FOLDER libtpu, and set EAGLE3_LIBTPU to FOLDER")
    return folder


def test_plans_of_small_programs_for_the_devices_at_hand():
    """The same path as for a pod: the products of the step are those on paper, and memory is that of the arrays."""
    mesh = make_mesh(fsdp=8)
    config = TrainConfig(recipe=recipe("aligned", steps=2), rows=8, row_tokens=64, row_slots=64, online=True)
    draft = DraftConfig.for_target(SMALL, 128, (0, 1, 2))
    plan = training_plan(SMALL, draft, config, mesh, CPU, platform="cpu")
    assert 1.0 <= plan.flops / plan.paper_flops < 1.3
    # float32 masters and two moments of each parameter, an eighth of them here, and more besides.
    assert plan.arguments > 3 * 4 * 64 * 128 * 3 / 8
    assert plan.fits
    assert {"all-gather", "reduce-scatter"} <= plan.collectives.keys()
    assert "| yes |" in plan_table([plan])
    tight = dataclasses.replace(plan, chip=dataclasses.replace(CPU, memory=plan.memory + 1))
    assert "| tight |" in plan_table([tight])
    assert "| NO |" in plan_table([dataclasses.replace(plan, chip=dataclasses.replace(CPU, memory=plan.memory - 1))])


def test_shapes_of_meshes():
    assert decoding_shape(LLAMA_31_8B, 16) == {"data": 2, "tensor": 8}
    assert decoding_shape(LLAMA_31_8B, 4) == {"data": 1, "tensor": 4}
    assert training_shape(256) == {"data": 4, "fsdp": 64}


def test_unknown_names(tmp_path: Path):
    with pytest.raises(ValueError, match=r"neither a known shape \(llama-3\.1-8b, llama-3\.3-70b\)"):
        target_shape("llama-9")
    with pytest.raises(ValueError, match="no folder libtpu in it"):
        topology_devices("v5e:4x4", str(tmp_path))


@pytest.mark.slow
def test_a_decoding_cycle_for_v5e(libtpu: str | None):
    """Two blocks at the widths of 8B: fits, and nothing but sums of activations and winners crosses the devices."""
    devices, chip = topology_devices("v5e:2x4", libtpu)
    target = dataclasses.replace(LLAMA_31_8B, num_layers=3)
    draft = DraftConfig.for_target(target, 32000, (0, 1, 2))
    mesh = make_mesh(tensor=8, devices=devices)
    plan = decoding_plan(target, draft, Chain(3).tree, 1, 8192, mesh, chip)
    assert plan.fits
    assert sum(traffic.bytes for traffic in plan.collectives.values()) < 2e6
    assert plan.temporaries < 0.2 * GIB
    # Three blocks, two heads and a draft layer in bfloat16, an eighth of them per device.
    assert 0.4 * GIB < plan.arguments < 0.7 * GIB


@pytest.mark.slow
def test_the_online_step_for_v5e(libtpu: str | None, capsys: pytest.CaptureFixture):
    devices, chip = topology_devices("v5e:4x4", libtpu)
    target = dataclasses.replace(LLAMA_31_8B, num_layers=3)
    config = TrainConfig(recipe=recipe("aligned"), rows=16, row_tokens=2048, row_slots=2048, online=True, compute="bfloat16")
    draft = DraftConfig.for_target(target, 32000, (0, 1, 2))
    plan = training_plan(target, draft, config, make_mesh(fsdp=16, devices=devices), chip)
    assert plan.fits
    assert plan.memory < 8 * GIB
    assert 1.0 <= plan.flops / plan.paper_flops < 1.2
    # Each weight is brought together once, in two bytes, and products are not cut into rings of small ones.
    weights = count_parameters(Target(target)) - target.vocab_size * target.hidden_size
    weights += count_parameters(Eagle3Draft(draft)) + target.hidden_size * draft.draft_vocab_size
    assert plan.collectives["all-gather"].bytes < 1.02 * 2 * weights
    assert plan.collectives.keys() <= {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}


def test_planning_from_the_command_line_needs_libtpu(tmp_path: Path, capsys: pytest.CaptureFixture):
    for script in (load_script("train", "train"), load_script("bench")):
        assert run_script(script, "--plan", "v5e:4x4", "--target", "llama-3.1-8b", "--libtpu", str(tmp_path)) == 2
        assert "no folder libtpu in it; fill it with: pip install --target" in capsys.readouterr().err
