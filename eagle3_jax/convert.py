"""Conversions of whole folders and their reports: the library side of eagle3-convert."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from eagle3_jax.config import TargetConfig
from eagle3_jax.diagnose import Diagnosis
from eagle3_jax.draft import Eagle3Draft, reread
from eagle3_jax.panels import in_plain
from eagle3_jax.target import Target
from eagle3_jax.terminal import table
from eagle3_jax.tokenizer import TokenizerError, load_tokenizer
from eagle3_jax.tuning.survival import FILE
from eagle3_jax.weights.builtin import BUILTIN_MODELS, builtin_file, builtin_head
from eagle3_jax.weights.heads import HeadFiles, load_head, save_head
from eagle3_jax.weights.inspection import Inspection, is_head, stand_in, stored_dtype
from eagle3_jax.weights.inspection import inspect as inspect_path
from eagle3_jax.weights.load import OTHERWISE, PATTERNS, load_target
from eagle3_jax.weights.model_card import model_card
from eagle3_jax.weights.save_target import save_target
from eagle3_jax.weights.source import locate
from eagle3_jax.weights.table import WeightsError


def inspect(path_or_id: str, target: str | None = None, **reading: Any) -> Inspection:
    """`weights.inspection.inspect` of a folder, hub id, .gguf file or built-in target; `target` is loaded and checked against."""
    path = locate(path_or_id, {name: partial(builtin_file, name) for name in BUILTIN_MODELS}, PATTERNS, OTHERWISE)
    return inspect_path(path, None if target is None else load_target(target).config, **reading)


def convert_head(
    source: str,
    out: str | Path,
    to: str = "official",
    *,
    target: str | None = None,
    target_name: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    taps: tuple[int, ...] | None = None,
    overrule_taps: bool = False,
    norm_before_residual: bool | None = None,
    rope_theta: float | None = None,
    tap_convention: str | None = None,
    card: Mapping[str, Any] | None = None,
    dialect: str | None = None,
) -> dict[str, Any]:
    """Writes a head (folder, hub id or built-in name) to the folder `out` in the dialect `to`, with a card; returns what was done.

    target: loaded, to settle default taps and to drop an embedding that is the target's; None: the head's own description is believed.
    taps, rope_theta, tap_convention, dialect (the source's): see `load_head`. overrule_taps: `taps` win over stored ones.
    norm_before_residual, rope_theta: corrections that the new files then say. card: data, recipe, acceptance of `model_card`.
    Raises ConfigError or WeightsError before anything is written.
    """
    folder = locate(source, {name: partial(builtin_head, name) for name in BUILTIN_MODELS}, PATTERNS, OTHERWISE)
    if not folder.is_dir():
        raise WeightsError(f"{folder}: expected the folder of a head (config.json and its tensors)")
    if not is_head(folder):
        raise WeightsError(f"{folder}: not an EAGLE-3 head; `eagle3-convert inspect` says what it is")
    files = HeadFiles(folder, dialect)
    known: Target | TargetConfig = load_target(target) if target is not None else stand_in(files.flat)
    settle = None if overrule_taps else taps
    if target is None and not _settled(files.flat, settle):
        raise WeightsError(f"{folder}: neither taps nor the target's depth are stored: name --target or --taps")
    draft = load_head(folder, known, settle, rope_theta, tap_convention=tap_convention, dialect=dialect)
    changes: dict[str, Any] = {"taps": taps} if overrule_taps and taps else {}
    if norm_before_residual is not None:
        changes["norm_before_residual"] = norm_before_residual
    depth = known.config.num_layers if isinstance(known, Target) else files.flat.get("target_num_hidden_layers")
    draft = reread(draft, dataclasses.replace(draft.config, target_num_layers=depth, **changes))
    kind = dtype or stored_dtype(files)
    name = target_name or target or _stored_target(files.raw)
    earlier = folder / "README.md"
    text = model_card(
        draft.config,
        to,
        target_name=name,
        dtype=kind,
        origin=f"`{Path(source).name}` ({files.dialect.name} dialect)",
        earlier=earlier.read_text(encoding="utf-8", errors="replace") if earlier.is_file() else None,
        **(card or {}),
    )
    embedding = in_plain(known.embed[...]) if to == "speculators" and isinstance(known, Target) else None
    written = save_head(draft, out, kind, overwrite=overwrite, dialect=to, target_name=name, card=text, embedding=embedding)
    if (folder / FILE).is_file() and not changes and rope_theta is None:
        # The same head accepts the same; one whose reading was corrected does not.
        shutil.copyfile(folder / FILE, written / FILE)
    return {"source": str(source), "from": files.dialect.name, "to": to, "folder": str(written), "dtype": kind, **_about(draft)}


def _settled(flat: Mapping[str, Any], taps: tuple[int, ...] | None) -> bool:
    stored = ("eagle_taps", "eagle_aux_hidden_state_layer_ids", "target_num_hidden_layers", "eagle_config")
    return bool(taps) or any(flat.get(key) for key in stored)


def _stored_target(raw: Mapping[str, Any]) -> str | None:
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path")


def _about(draft: Eagle3Draft) -> dict[str, Any]:
    c = draft.config
    return {"taps": list(c.taps), "rope_theta": c.rope.theta, "own_embedding": c.own_embedding}


def convert_target(source: str, out: str | Path, dtype: str = "float32", overwrite: bool = False) -> Path:
    """Writes a target (folder, hub id, .gguf file, built-in name) as a Hugging Face folder, with its tokenizer where it has one."""
    target = load_target(source)
    try:
        tokenizer = load_tokenizer(source)
    except (TokenizerError, OSError):
        tokenizer = None
    return save_target(target, out, dtype, overwrite=overwrite, tokenizer=tokenizer)


def inspection_text(found: Inspection) -> str:
    """For a person."""
    lines = [f"{found.path}: {'an EAGLE-3 head' if found.kind == 'head' else 'a target'}"]
    rows = [[name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)] for name, value in found.facts.items()]
    if rows:
        width = max(len(name) for name, _ in rows)
        lines += [f"  {name.ljust(width)}  {value}" for name, value in rows]
    lines += [f"  odd: {text}" for text in found.odd]
    lines.append("It loads." if found.error is None else f"It does NOT load: {found.error}")
    return "\n".join(lines)


def diagnosis_json(found: Diagnosis) -> dict[str, Any]:
    """For a program: the fields of `Diagnosis`, each reading with its acceptance length."""
    readings = [{**dataclasses.asdict(reading), "acceptance_length": reading.acceptance_length} for reading in found.readings]
    return {**dataclasses.asdict(found), "readings": readings}


def diagnosis_text(found: Diagnosis) -> str:
    """For a person."""
    steps = len(found.readings[0].accuracy)
    header = ["reading", *(f"draft {i + 1} right" for i in range(steps)), "all right so far", "tokens per cycle"]
    rows = [header]
    for reading in found.readings:
        so_far = " ".join(f"{x:.2f}" for x in reading.survival)
        rows.append([reading.name, *(f"{x:.3f}" for x in reading.accuracy), so_far, f"{reading.acceptance_length:.2f}"])
    real = ", ".join("-" if x is None else f"{x:.2f}" for x in found.per_position)
    return "\n".join(
        [
            table(rows),
            "",
            f"Decoding with the head as it was read: {found.decoded:.2f} tokens per cycle, {found.tokens} tokens; drafts 1 to {steps} "
            f"stand with chance {real}. The table scores all {found.readings[0].slots} positions of those answers, not only cycle starts.",
            "",
            f"Verdict: {found.verdict}. {found.advice}",
        ]
    )
