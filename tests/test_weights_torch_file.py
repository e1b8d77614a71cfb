"""PyTorch's `.bin` files, written by torch and read without it."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from test_weights_heads import TARGET
from tiny_checkpoints import head_tensors

from eagle3_jax.params import named_variables
from eagle3_jax.weights import WeightsError, load_draft
from eagle3_jax.weights.torch_file import TorchFile

REFERENCE = Path(__file__).parent / "reference"


def test_a_published_head(tmp_path: Path):
    """The same head from torch's file and from safetensors."""
    config, tensors = head_tensors()
    heads = []
    for name in ("torch", "safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if name == "torch":
            (folder / "pytorch_model.bin").write_bytes((REFERENCE / "torch_head.bin").read_bytes())
        else:
            save_file(tensors, folder / "model.safetensors")
        heads.append(dict(named_variables(load_draft(folder, TARGET))))
    for path, variable in heads[0].items():
        np.testing.assert_array_equal(variable.get_value(), heads[1][path].get_value(), err_msg=path)
    np.testing.assert_array_equal(heads[0]["q"].get_value(), tensors["midlayer.self_attn.q_proj.weight"].astype(np.float32).T)


def test_every_storage_type_and_views_of_a_storage():
    file = TorchFile(REFERENCE / "torch_views.bin")
    six = np.arange(6).reshape(2, 3)
    dtypes: dict[str, Any] = {"f64": np.float64, "f16": np.float16, "bf16": jnp.bfloat16, "i64": np.int64, "i32": np.int32}
    dtypes |= {"i16": np.int16, "i8": np.int8, "u8": np.uint8, "bool": np.bool_}
    base = np.arange(24, dtype=np.float32)
    expected = {name: six.astype(dtype) for name, dtype in dtypes.items()}
    expected |= {"tail": base[20:], "columns": base.reshape(4, 6)[:, 1::2], "transposed": base.reshape(4, 6).T}
    expected |= {"scalar": np.float32(3.5), "parameter": base[:3], "empty": np.zeros((0, 3), np.float32)}
    assert set(file.keys()) == expected.keys()
    for key, array in expected.items():
        got = file.read(key)
        assert got.dtype == array.dtype, key
        assert got.shape == array.shape, key
        np.testing.assert_array_equal(got, array, err_msg=key)


def test_damaged_and_legacy_files_are_named(tmp_path: Path):
    whole = (REFERENCE / "torch_head.bin").read_bytes()
    path = tmp_path / "pytorch_model.bin"
    for content in (whole[:-30], whole[:100], b"", b"PK garbage", (REFERENCE / "torch_legacy.bin").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=r"pytorch_model\.bin: not a PyTorch checkpoint"):
            TorchFile(path)


class Bomb:
    """A pickle that would create a file when loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def archive(path: Path, pickled: bytes, storage: bytes = b"") -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model/data.pkl", pickled)
        file.writestr("model/data/0", storage)
    return path


def test_a_pickle_cannot_run_anything(tmp_path: Path):
    victim = tmp_path / "victim"
    path = archive(tmp_path / "pytorch_model.bin", pickle.dumps({"fc.weight": Bomb(victim)}))
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin: .*refused"):
        TorchFile(path)
    assert not victim.exists()


def test_a_file_of_something_else_is_refused(tmp_path: Path):
    for content in ([1, 2], {"epoch": 3}):
        with pytest.raises(WeightsError, match="expected a state dict"):
            TorchFile(archive(tmp_path / "x.bin", pickle.dumps(content)))


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "message"),
    [
        (0, (3,), (1,), "past its storage of 2"),
        (2, (1,), (1,), "past its storage"),
        (0, (2,), (-1,), "negative"),
        (-1, (1,), (1,), "negative"),
    ],
)
def test_a_tensor_outside_its_storage_is_refused(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = TorchFile(archive(tmp_path / "x.bin", pickle.dumps({}), np.zeros(2, np.float32).tobytes()))
    from eagle3_jax.weights.torch_file import StoredTensor

    file._tensors["fc"] = StoredTensor(np.dtype(np.float32), "0", offset, shape, strides)
    with pytest.raises(WeightsError, match=message):
        file.read("fc")


def test_an_absent_storage_is_named(tmp_path: Path):
    whole = zipfile.ZipFile(REFERENCE / "torch_head.bin")
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as file:
        for name in whole.namelist():
            if not name.endswith("data/0"):
                file.writestr(name, whole.read(name))
    torch_file = TorchFile(path)
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin: tensor 'fc\.weight' cannot be read"):
        torch_file.read("fc.weight")
