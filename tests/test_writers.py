"""Training's records on their way to JSON lines, TensorBoard and Weights & Biases."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3_jax.training.writers import JsonLines, TensorBoard, WeightsAndBiases, scalars

RECORD = {"step": 3, "loss": 1.5, "accuracy": [0.5, 0.25], "held_out": {"loss": [2.0]}, "slots": 4}
WANTED = {"loss": 1.5, "accuracy/0": 0.5, "accuracy/1": 0.25, "held_out/loss/0": 2.0, "slots": 4.0}


def test_one_number_per_tag() -> None:
    assert dict(scalars(RECORD)) == WANTED


def test_weights_and_biases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list = []
    run = SimpleNamespace(log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finished"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **arguments: calls.append(arguments) or run))
    writer = WeightsAndBiases("heads", {"train": {"steps": 5}}, tmp_path)
    writer.write(RECORD)
    writer.close()
    assert calls == [{"project": "heads", "config": {"train": {"steps": 5}}, "dir": str(tmp_path)}, (3, WANTED), "finished"]


@pytest.mark.parametrize(
    ("writer", "name"), [(lambda at: TensorBoard(at), "tensorboard"), (lambda at: WeightsAndBiases("p", {}, at), "wandb")]
)
def test_a_missing_package_is_named(writer, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("wandb", "tensorboard", "tensorboard.compat.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"pip install 'eagle3-jax\[{name}\]'"):
        writer(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(tmp_path)
    writer.write(RECORD)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]} == WANTED
    assert events.Scalars("loss")[0].step == 3


def test_a_full_disk_costs_lines_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    log = JsonLines("/dev/full")
    log.write(RECORD)
    log.write(RECORD)
    log.close()
    assert capsys.readouterr().err.count("records are being lost") == 1
