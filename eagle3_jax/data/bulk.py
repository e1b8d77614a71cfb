"""Many conversations at once: what was kept, what was dropped and why, and a look at the first masks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3_jax.data.conversations import ConversationError, parse_record
from eagle3_jax.data.parallel import ordered_map
from eagle3_jax.data.sources import DataError
from eagle3_jax.data.template_masks import Example, encode_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT_OFF = "no response within the length limit"
BRACKETS = ("⟦", "⟧")
GREEN = ("\x1b[32m", "\x1b[0m")


@dataclasses.dataclass
class Report:
    """records = kept + dropped; bad_lines were no records at all. A conversation gives several examples where the template needs it.

    truncated: kept examples that were cut to the length limit. dropped: conversations by reason; details: the first case of each reason.
    """

    records: int = 0
    bad_lines: int = 0
    kept: int = 0
    examples: int = 0
    truncated: int = 0
    tokens: int = 0
    supervised: int = 0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    details: dict[str, str] = dataclasses.field(default_factory=dict)

    def add_bad_line(self, error: DataError) -> None:
        """Counts a line that is not JSON."""
        self.bad_lines += 1
        self.details.setdefault("line is not valid JSON", str(error))

    def drop(self, error: ConversationError) -> None:
        """Counts a conversation that cannot be used."""
        self.dropped[error.reason] += 1
        self.details.setdefault(error.reason, str(error))

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON knows them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {"dropped": dict(self.dropped)}

    def __str__(self) -> str:
        share = self.supervised / self.tokens if self.tokens else 0.0
        lines = [
            f"conversations  {self.records}: {self.kept} kept, {self.dropped.total()} dropped",
            f"examples       {self.examples}, of which {self.truncated} truncated to the length limit",
            f"tokens         {self.tokens}, {self.supervised} supervised ({share:.1%})",
        ]
        if self.bad_lines:
            lines.append(f"bad lines      {self.bad_lines} skipped; first: {self.details['line is not valid JSON']}")
        for reason, count in self.dropped.most_common():
            lines.append(f"dropped        {count}: {reason}; first: {_short(self.details[reason], 160)}")
        return "\n".join(lines)


def encode_all(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[tuple[str, Any]],
    report: Report,
    *,
    format: str | None = None,
    max_length: int | None = None,
    last_turn_only: bool = False,
    processes: int = 1,
) -> list[Example]:
    """Examples of all usable records (from `read_records`), in order; `report` is filled along the way.

    Examples longer than max_length tokens keep their first max_length, and are dropped when no response is left.
    processes: that many encode, in chunks, once a set shows to be large; the result is the same.
    Raises DataError when nothing at all is supervised, or the tokenizer has no chat template.
    """
    examples: list[Example] = []
    encode = partial(encode_record, tokenizer, format=format, max_length=max_length, last_turn_only=last_turn_only)
    for result in ordered_map(encode, records, processes):
        report.records += 1
        if isinstance(result, ConversationError):
            report.drop(result)
            continue
        kept, cut = result
        report.kept += 1
        report.truncated += cut
        examples.extend(kept)
    report.examples = len(examples)
    report.tokens = sum(map(len, examples))
    report.supervised = sum(example.supervised for example in examples)
    if not report.supervised:
        raise DataError(f"no supervised token in the whole set: nothing to train on\n{report}")
    return examples


def encode_record(
    tokenizer: PreTrainedTokenizerBase,
    located: tuple[str, Any],
    *,
    format: str | None = None,
    max_length: int | None = None,
    last_turn_only: bool = False,
) -> tuple[list[Example], int] | ConversationError:
    """The usable examples of one record (where, value), and how many of them were cut; or why it cannot be used."""
    where, record = located
    try:
        turns = encode_turns(tokenizer, parse_record(record, format, where), last_turn_only=last_turn_only)
        kept = [(short, turn) for turn in turns if (short := truncate(turn, max_length)).supervised]
        if not kept:
            raise ConversationError(CUT_OFF, f"{where}: {max(map(len, turns))} tokens, limit {max_length}")
    except ConversationError as error:
        return error
    return [short for short, _ in kept], sum(len(short) < len(turn) for short, turn in kept)


def truncate(example: Example, max_length: int | None) -> Example:
    """The first max_length tokens; all of them when None."""
    if max_length is None or len(example) <= max_length:
        return example
    return Example(example.ids[:max_length], example.response[:max_length])


def mark_responses(tokenizer: PreTrainedTokenizerBase, example: Example, marks: tuple[str, str] = BRACKETS, *, longest: int = 400) -> str:
    """The example as text with its responses between marks (`BRACKETS`, or `GREEN` for a terminal).

    Stretches of more than `longest` characters lose their middle.
    """
    edges = [0, *(np.flatnonzero(np.diff(example.response)) + 1).tolist(), len(example)]
    parts = []
    for start, stop in pairwise(edges):
        text = _short(str(tokenizer.decode(example.ids[start:stop].tolist())), longest)
        parts.append(f"{marks[0]}{text}{marks[1]}" if example.response[start] else text)
    return "".join(parts)


def _short(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} … {text[-half:]}"
