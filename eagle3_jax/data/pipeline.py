"""From a source of conversations to prepared data on disk: the library side of the command `eagle3-data`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.data.bulk import BRACKETS, Report, encode_all, mark_responses
from eagle3_jax.data.prepared import check_output, load_prepared, save_prepared
from eagle3_jax.data.sources import DataError, preset_format, read_records
from eagle3_jax.tokenizer import load_tokenizer
from eagle3_jax.vocab import DraftVocab, count_tokens, coverage, save_vocab, select_vocab


def prepare(
    source: str | Path,
    out: str | Path,
    tokenizer_name: str,
    *,
    format: str | None = None,
    split: str | None = None,
    max_length: int | None = 2048,
    last_turn_only: bool = False,
    skip_bad_lines: bool = False,
    limit: int | None = None,
    overwrite: bool = False,
    processes: int = 1,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Report:
    """Reads conversations, encodes them with the tokenizer's chat template, writes the folder `out`, returns the report.

    source, split: as in `read_records`; processes: as in `encode_all`. max_length in tokens (None: no limit).
    limit: read that many records only.
    progress: wraps the iterable of records. Raises DataError; `out` is then left as it was.
    """
    if max_length is not None and max_length < 2:
        raise DataError(f"max_length {max_length}: an example needs at least 2 tokens")
    out = check_output(out, overwrite)
    tokenizer = load_tokenizer(tokenizer_name)
    report = Report()
    records = read_records(source, split=split, on_bad_line=report.add_bad_line if skip_bad_lines else None)
    format = format or preset_format(source)
    examples = encode_all(
        tokenizer,
        progress(islice(records, limit)),
        report,
        format=format,
        max_length=max_length,
        last_turn_only=last_turn_only,
        processes=processes,
    )
    about = {
        "source": str(source),
        "tokenizer": str(tokenizer_name),
        "chat_template_sha256": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        "vocab_size": len(tokenizer),
        "max_length": max_length,
        "last_turn_only": last_turn_only,
        "report": report.to_json(),
    }
    save_prepared(out, examples, about, overwrite=overwrite)
    return report


def draft_vocab(folder: str | Path, size: int, out: str | Path) -> DraftVocab:
    """Counts the response tokens of prepared data, keeps the `size` most frequent, writes them to `out` (see `vocab.save_vocab`)."""
    data = load_prepared(folder)
    counts = count_tokens([data], int(data.about["vocab_size"]))
    kept = select_vocab(counts, size)
    vocab = DraftVocab(kept, len(counts), coverage(counts, kept), int(np.count_nonzero(counts)))
    save_vocab(out, vocab)
    return vocab


def show(folder: str | Path, count: int, tokenizer_name: str | None = None, marks: tuple[str, str] = BRACKETS) -> list[str]:
    """The first `count` examples of prepared data as text with their responses marked; the tokenizer is the one it was prepared with."""
    data = load_prepared(folder)
    tokenizer = load_tokenizer(tokenizer_name or data.about["tokenizer"])
    return [mark_responses(tokenizer, example, marks) for example in islice(data, count)]
