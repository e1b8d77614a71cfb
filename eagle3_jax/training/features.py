"""What the frozen target knows about the training text, computed once and kept on disk in bounded shards.

Per token: the tapped features [A] and the final normed hidden state [D] in bfloat16, the full-vocabulary argmax of the target's
logits (int32, -1 where no supervised slot asks for it), the id and the response number. A shard is a folder of .npy files that
appears under its final name only when complete, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eagle3_jax import target as target_model
from eagle3_jax.data.packing import TokenExample
from eagle3_jax.panels import in_plain
from eagle3_jax.params import named_variables
from eagle3_jax.whole_file import write_json

FORMAT = 1
_MANIFEST = "manifest.json"
_ARRAYS = ("ids", "response", "argmax", "features", "hidden")


class CacheError(ValueError):
    """A feature cache that cannot be used; the message names the folder and what differs."""


@dataclasses.dataclass(frozen=True)
class CachedExample:
    """ids, response, argmax: int32 [n]; features [n, A] and hidden [n, D]: bfloat16 views of the shard's files.

    The last three are None where the target runs within the training step.
    """

    ids: np.ndarray
    response: np.ndarray
    argmax: np.ndarray | None = None
    features: np.ndarray | None = None
    hidden: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Selection:
    """The examples a cache will hold, and what happened to the others."""

    examples: list[tuple[np.ndarray, np.ndarray]]
    truncated: int
    unsupervised: int

    def report(self) -> str:
        tokens = sum(len(ids) for ids, _ in self.examples)
        supervised = sum(int(np.sum(response > 0)) for _, response in self.examples)
        return (
            f"{len(self.examples)} examples, {tokens} tokens, {supervised} in responses ({supervised / max(1, tokens):.0%}); "
            f"{self.truncated} truncated, {self.unsupervised} dropped for lack of a supervised slot"
        )


def select(examples: Sequence[TokenExample], max_tokens: int) -> Selection:
    """Truncates to `max_tokens`; drops what then has no two neighbouring response tokens (no state of a decode can be trained on it)."""
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    truncated = unsupervised = 0
    for example in examples:
        ids, response = np.asarray(example.ids, np.int32), np.asarray(example.response, np.int32)
        cut = len(ids) > max_tokens
        ids, response = ids[:max_tokens], response[:max_tokens]
        if not np.any((response[1:] > 0) & (response[1:] == response[:-1])):
            unsupervised += 1
            continue
        truncated += cut
        kept.append((ids, response))
    return Selection(kept, truncated, unsupervised)


def fingerprint(target: target_model.Target) -> str:
    """SHA-256 over the target's configuration, as far as it is not the default, and every parameter's bytes.

    What later versions add to the configuration, and leave at its default, makes no cache useless.
    """
    config = target.config
    unusual = {field.name: value for field in dataclasses.fields(config) if (value := getattr(config, field.name)) != field.default}
    digest = hashlib.sha256(repr(unusual).encode())
    for name, variable in named_variables(target):
        value = np.asarray(in_plain(variable.get_value()))
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def identity(target: target_model.Target, taps: tuple[int, ...], selection: Selection, max_tokens: int) -> dict[str, Any]:
    """What must agree for a cache to be the right one. The data's hash covers ids and masks, hence tokenizer and template."""
    data = hashlib.sha256()
    for ids, response in selection.examples:
        data.update(ids.tobytes() + b"|" + response.tobytes() + b"\n")
    return {
        "format": FORMAT,
        "target": fingerprint(target),
        "taps": list(taps),
        "max_tokens": max_tokens,
        "data": data.hexdigest(),
        "examples": len(selection.examples),
    }


def byte_budget(target: target_model.Target, taps: tuple[int, ...], selection: Selection) -> int:
    """Bytes the finished cache takes on disk."""
    width = target.config.hidden_size * (len(taps) + 1)
    return sum(len(ids) for ids, _ in selection.examples) * (2 * width + 3 * 4)


class FeatureCache:
    """Random access to the examples of the finished shards; `len` counts those. Arrays are memory maps: nothing is read ahead."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder, self.manifest = folder, manifest
        self._starts: list[int] = []
        self._shards: list[dict[str, np.ndarray]] = []
        count = 0
        for number, _ in enumerate(manifest["shards"]):
            path = folder / _shard_name(number)
            if not path.is_dir():
                break
            shard = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in (*_ARRAYS, "offsets")}
            self._starts.append(count)
            self._shards.append(shard)
            count += len(shard["offsets"]) - 1
        self._count = count

    def __len__(self) -> int:
        return self._count

    @property
    def total(self) -> int:
        """Examples the finished cache will hold."""
        return self.manifest["identity"]["examples"]

    @property
    def complete(self) -> bool:
        return len(self._shards) == len(self.manifest["shards"])

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.manifest["identity"]["taps"])

    def __getitem__(self, index: int) -> CachedExample:
        if not 0 <= index < self._count:
            raise IndexError(f"example {index} of {self._count}")
        number = bisect.bisect_right(self._starts, index) - 1
        shard, local = self._shards[number], index - self._starts[number]
        begin, end = (int(o) for o in shard["offsets"][local : local + 2])
        return CachedExample(
            ids=shard["ids"][begin:end],
            response=shard["response"][begin:end],
            argmax=shard["argmax"][begin:end],
            features=shard["features"][begin:end].view(ml_dtypes.bfloat16),
            hidden=shard["hidden"][begin:end].view(ml_dtypes.bfloat16),
        )

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, response) of one example."""
        example = self[index]
        return example.ids, example.response


def open_cache(folder: str | Path, expected: dict[str, Any] | None = None, partial_ok: bool = False) -> FeatureCache:
    """Opens a cache. Raises CacheError when there is none, when it is unfinished (unless `partial_ok`), or when its identity differs
    from `expected`, naming each difference."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except FileNotFoundError:
        raise CacheError(f"{folder}: no feature cache here ({_MANIFEST} is missing)") from None
    except json.JSONDecodeError as error:
        raise CacheError(f"{folder / _MANIFEST}: not valid JSON ({error})") from None
    if expected is not None:
        check_identity(folder, manifest["identity"], expected)
    cache = FeatureCache(folder, manifest)
    if not cache.complete and not partial_ok:
        raise CacheError(
            f"{folder}: unfinished, {len(cache)} of {manifest['identity']['examples']} examples; run the extraction again to finish it"
        )
    return cache


def check_identity(folder: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises CacheError listing every field in which the cache on disk differs from what is needed."""
    keys = sorted(found.keys() | expected.keys())
    different = [f"{key}: cache {found.get(key)!r}, needed {expected.get(key)!r}" for key in keys if found.get(key) != expected.get(key)]
    if different:
        raise CacheError(f"{folder}: made for something else; {'; '.join(different)}. Name another folder or delete this one")


def write_cache(
    target: target_model.Target,
    taps: tuple[int, ...],
    selection: Selection,
    folder: str | Path,
    *,
    max_tokens: int,
    shard_tokens: int = 98304,
    batch_tokens: int = 2560,
    known: Sequence[FeatureCache] = (),
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[int], object] = lambda tokens: None,
) -> FeatureCache:
    """Runs the target over every example of `selection`, in its order, and returns the finished cache.

    Finished shards of an earlier run of the same identity are kept; one of another identity raises CacheError.
    batch_tokens: tokens of one pass, padding included. known: caches, finished or not, of this target and these taps (CacheError if not);
    what they hold of the same examples is copied instead of computed. say: told the byte budget beforehand. progress: told tokens as they
    finish.
    """
    folder = Path(folder)
    wanted = identity(target, taps, selection, max_tokens)
    at_hand = _at_hand(known, wanted)
    ranges = _shard_ranges([len(ids) for ids, _ in selection.examples], shard_tokens)
    if (folder / _MANIFEST).exists():
        manifest = json.loads((folder / _MANIFEST).read_text())
        check_identity(folder, manifest["identity"], wanted)
        ranges = [tuple(r) for r in manifest["shards"]]
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / _MANIFEST, {"identity": wanted, "shards": ranges})
    say(f"feature cache {folder}: {selection.report()}; {byte_budget(target, taps, selection) / 2**30:.2f} GiB in {len(ranges)} shards")
    if known:
        say(f"{sum(_content(*example) in at_hand for example in selection.examples)} examples' features are taken over")
    for number, (begin, end) in enumerate(ranges):
        final = folder / _shard_name(number)
        examples = selection.examples[begin:end]
        if final.is_dir():
            progress(sum(len(ids) for ids, _ in examples))
            continue
        arrays = _run(target, taps, examples, batch_tokens, progress, at_hand)
        unfinished = folder / f"{_shard_name(number)}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for name, value in arrays.items():
            np.save(unfinished / f"{name}.npy", value)
        os.rename(unfinished, final)
    return open_cache(folder, wanted)


def _content(ids: np.ndarray, response: np.ndarray) -> bytes:
    """What an example's features depend on, beside target and taps."""
    return hashlib.sha256(ids.tobytes() + b"|" + response.tobytes()).digest()


def _at_hand(known: Sequence[FeatureCache], wanted: dict[str, Any]) -> dict[bytes, tuple[FeatureCache, int]]:
    """Where the examples of other caches are, by content. Raises CacheError for one of another target or other taps."""
    places: dict[bytes, tuple[FeatureCache, int]] = {}
    for cache in known:
        own, same = cache.manifest["identity"], ("format", "target", "taps")
        check_identity(cache.folder, {key: own.get(key) for key in same}, {key: wanted[key] for key in same})
        places.update((_content(*cache.tokens(index)), (cache, index)) for index in range(len(cache)))
    return places


def _run(
    target: target_model.Target,
    taps: tuple[int, ...],
    examples: list[tuple[np.ndarray, np.ndarray]],
    batch_tokens: int,
    progress: Callable[[int], object],
    at_hand: Mapping[bytes, tuple[FeatureCache, int]],
) -> dict[str, np.ndarray]:
    """The arrays of one shard."""
    lengths = [len(ids) for ids, _ in examples]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total, D = int(offsets[-1]), target.config.hidden_size
    ids = np.concatenate([ids for ids, _ in examples]).astype(np.int32)
    response = np.concatenate([response for _, response in examples]).astype(np.int32)
    features = np.zeros((total, D * len(taps)), np.uint16)
    hidden = np.zeros((total, D), np.uint16)
    argmax = np.full(total, -1, np.int32)
    # Position t is a teacher when the token it predicts belongs to a response.
    teacher = np.zeros(total, bool)
    teacher[:-1] = response[1:] > 0
    teacher[offsets[1:] - 1] = False
    unknown = []
    for i, example in enumerate(examples):
        if (place := at_hand.get(_content(*example))) is None:
            unknown.append(i)
            continue
        found, into = place[0][place[1]], slice(int(offsets[i]), int(offsets[i + 1]))
        assert found.features is not None and found.hidden is not None and found.argmax is not None
        features[into], hidden[into], argmax[into] = found.features.view(np.uint16), found.hidden.view(np.uint16), found.argmax
        progress(lengths[i])
    for batch in _batches(lengths, unknown, batch_tokens):
        width = _bucket(max(lengths[i] for i in batch))
        # As many rows for every batch of a width: one compilation per width.
        tokens = np.zeros((max(1, batch_tokens // width), width), np.int32)
        # What stands before the first response, as far as one sequence can tell: later turns are other prompts when served.
        prompts = np.zeros(len(tokens), np.int32)
        for b, i in enumerate(batch):
            tokens[b, : lengths[i]] = examples[i][0]
            prompts[b] = np.argmax(examples[i][1] > 0)
        hidden32, tapped = (np.asarray(x) for x in _forward(target, taps, tokens, prompts))
        tapped = tapped.view(np.uint16)
        chosen: list[np.ndarray] = []
        at: list[np.ndarray] = []
        for b, i in enumerate(batch):
            into, own = slice(int(offsets[i]), int(offsets[i + 1])), slice(0, lengths[i])
            features[into] = tapped[b, own]
            hidden[into] = hidden32[b, own].astype(ml_dtypes.bfloat16).view(np.uint16)
            index = np.flatnonzero(teacher[into])
            chosen.append(hidden32[b][index])
            at.append(index + into.start)
        argmax[np.concatenate(at)] = _argmax_rows(target, np.concatenate(chosen))
        progress(sum(lengths[i] for i in batch))
    return {"ids": ids, "response": response, "argmax": argmax, "features": features, "hidden": hidden, "offsets": offsets}


@partial(jax.jit, static_argnums=1)
def _forward(
    target: target_model.Target, taps: tuple[int, ...], tokens_BT: jax.Array, prompt_B: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """(hidden float32 [B, T, D], features bfloat16 [B, T, A]); right padding needs no mask, since no token reads what follows it."""
    positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
    out = target_model.forward(target, tokens_BT, positions, None, taps=taps, prompt_B=prompt_B)
    return out.hidden.astype(jnp.float32), out.features.astype(jnp.bfloat16)


def _bucket(length: int) -> int:
    """The static width for examples of `length` tokens: few widths, little padding."""
    step = 64 if length <= 384 else 32 if length <= 448 else 128
    return max(128, -(-length // step) * step)


def _batches(lengths: Sequence[int], chosen: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """The chosen examples by falling length, cut into batches of at most `batch_tokens` tokens, padding included."""
    order, batches = sorted(chosen, key=lambda i: (-lengths[i], i)), []
    while order:
        rows = max(1, batch_tokens // _bucket(lengths[order[0]]))
        batches.append(order[:rows])
        order = order[rows:]
    return batches


def _argmax_rows(target: target_model.Target, hidden_ND: np.ndarray, chunk: int = 512) -> np.ndarray:
    """int32 [rows]: the full-vocabulary argmax, `chunk` rows of logits alive at a time, ties to the lowest id."""
    count = len(hidden_ND)
    padded = np.zeros((-(-count // chunk) * chunk, hidden_ND.shape[1]), np.float32)
    padded[:count] = hidden_ND
    parts = [np.asarray(_argmax_chunk(target, padded[i : i + chunk])) for i in range(0, len(padded), chunk)]
    return np.concatenate(parts)[:count] if parts else np.zeros(0, np.int32)


@jax.jit
def _argmax_chunk(target: target_model.Target, hidden_ND: jax.Array) -> jax.Array:
    return target_model.best_token(target, hidden_ND.astype(target.dtype))


def _shard_ranges(lengths: Sequence[int], shard_tokens: int) -> list[tuple[int, int]]:
    ranges, begin, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        if tokens and tokens + length > shard_tokens:
            ranges.append((begin, i))
            begin, tokens = i, 0
        tokens += length
    if begin < len(lengths):
        ranges.append((begin, len(lengths)))
    return ranges


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}"
