"""Answers by the target itself: the questions of any data set, answered anew by the model whose head is to be trained.

A head learns to foresee its target, so it should be trained on what the target would say (paper section 3.2 does so for ShareGPT).
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eagle3_jax.data.conversations import ConversationError, questions
from eagle3_jax.data.parallel import ordered_map
from eagle3_jax.data.sources import DataError, preset_format, read_records
from eagle3_jax.decoding.serve import BROKEN, Answer, Job, Server
from eagle3_jax.journal import Journal
from eagle3_jax.tokenizer import chat_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turns = Literal["all", "first"]
TURNS: tuple[Turns, ...] = ("all", "first")


@dataclasses.dataclass(frozen=True)
class Source:
    """Which questions are asked.

    name, split, format: as in `read_records` and `questions`. turns: "all", every question of a conversation in sequence, behind the new
    answers to those before; "first" only. system: a system message for conversations without one. limit: records read.
    share: (i, n), every n-th record from the i-th on, so that n runs share the work; their files together are the whole.
    max_prompt: tokens of the longest prompt that is answered. skip_bad_lines: pass over lines that are not JSON, and count them.
    """

    name: str
    split: str | None = None
    format: str | None = None
    turns: Turns = "all"
    system: str | None = None
    limit: int | None = None
    share: tuple[int, int] = (0, 1)
    max_prompt: int = 2048
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        if self.turns not in TURNS:
            raise DataError(f"turns {self.turns!r}: one of {', '.join(TURNS)}")
        if not 0 <= self.share[0] < self.share[1]:
            raise DataError(f"share {self.share[0]} of {self.share[1]}: must lie in 0..{self.share[1] - 1}")

    def about(self) -> dict[str, Any]:
        """What decides which questions are asked; a file's contents stand for its name."""
        fields = dataclasses.asdict(self)
        if Path(self.name).is_file():
            digest = hashlib.sha256()
            with open(self.name, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            fields["name"] = digest.hexdigest()
        return fields


@dataclasses.dataclass
class Tally:
    """What became of the questions. records = kept + dropped, when all is done.

    answers: turns answered; cut: those that ended at the limit of tokens. details: the first case of each reason.
    earlier: conversations taken over from an interrupted run. tokens, seconds, tau (the acceptance length): of this run alone.
    """

    records: int = 0
    bad_lines: int = 0
    kept: int = 0
    answers: int = 0
    response_tokens: int = 0
    cut: int = 0
    earlier: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tau: float = 1.0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    details: dict[str, str] = dataclasses.field(default_factory=dict)

    def drop(self, reason: str, detail: str) -> None:
        self.dropped[reason] += 1
        self.details.setdefault(reason, detail)

    def add_bad_line(self, error: DataError) -> None:
        self.bad_lines += 1
        self.details.setdefault("line is not valid JSON", str(error))

    @property
    def rate(self) -> float:
        """Tokens per second of this run."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        lines = [
            f"conversations  {self.records}: {self.kept} kept, {self.dropped.total()} dropped",
            f"answers        {self.answers}, {self.response_tokens} tokens; {self.cut} cut at the limit",
        ]
        if self.earlier:
            lines.append(f"taken over     {self.earlier} conversations of the interrupted run")
        if self.tokens:
            lines.append(f"speed          {self.rate:.1f} tokens/s, prompts included; {self.tokens} tokens in {self.seconds:.0f} s")
        if self.bad_lines:
            lines.append(f"bad lines      {self.bad_lines} skipped; first: {self.details['line is not valid JSON']}")
        lines += [f"dropped        {count}: {reason}; first: {self.details[reason]}" for reason, count in self.dropped.most_common()]
        return "\n".join(lines)


@dataclasses.dataclass
class _Dialogue:
    """A conversation on its way: questions not asked yet, messages so far, and what was sampled for them."""

    number: int
    where: str
    keep: dict[str, Any]
    waiting: list[list[dict[str, Any]]]
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    response_ids: list[list[int]] = dataclasses.field(default_factory=list)
    reasons: list[str] = dataclasses.field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """As `parse_record` reads it; for a conversation that was never answered, what the tally needs."""
        if not self.reasons:
            return {"dropped": BROKEN, "where": self.where}
        one = len(self.reasons) == 1
        return {
            **self.keep,
            "messages": self.messages,
            "response_ids": self.response_ids[0] if one else self.response_ids,
            "finish_reason": self.reasons[0] if one else self.reasons,
        }


def regenerate(
    server: Server,
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    out: str | Path,
    *,
    seed: int = 0,
    about: dict[str, Any],
    resume: bool = False,
    processes: int = 1,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    say: Callable[[Tally, int], None] = lambda tally, waiting: None,
) -> Tally:
    """Asks the server every question of the source and writes the conversations to `out` (JSONL, gzip when named so), by record.

    A line holds id and source of the record where it has them, `index`, its place in the source, `messages`, and the sampled
    `response_ids` and `finish_reason`; several answers in lists. The noise of an answer depends on (seed, index, turn) alone, so
    neither the batch nor an interruption changes it. A conversation ends early where an answer reached the limit of tokens, or where
    the next prompt would be too long. Results are kept in `out`.part until the end (see `Journal`); `resume` goes on from there.

    about: what else decides the text (the target's fingerprint, temperature, ...), for telling whose .part it is.
    processes: that encode the first prompts. progress: wraps the records while they are read and encoded. say: called after every
    dispatch, with the number of conversations still to do.
    Raises DataError when the output cannot be used, the source is broken, or nothing could be kept.
    """
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template and conversations need one: use an instruct model, or set its chat_template")
    template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
    journal = Journal(out, {**about, **source.about(), "seed": seed, "chat_template": template}, resume=resume)
    tally = Tally(earlier=len(journal.found))
    longest = min(source.max_prompt, server.target.config.max_position - 1)

    def submit(dialogue: _Dialogue, prompt: np.ndarray) -> None:
        server.submit(Job(dialogue, prompt.tolist(), seed_of(seed, dialogue.number, len(dialogue.reasons))))

    try:
        waiting = 0
        items = _items(source, journal.found, tally, progress)
        for opened in ordered_map(partial(_open, tokenizer, source, longest), items, processes):
            if isinstance(opened, ConversationError):
                tally.drop(opened.reason, str(opened))
            else:
                submit(*opened)
                waiting += 1
        start = time.monotonic()
        for answers in server.run():
            ended: dict[int, Any] = {}
            for answer in answers:
                dialogue = answer.job.key
                prompt = _next_prompt(tokenizer, dialogue, longest) if _take(tokenizer, dialogue, answer) else None
                if isinstance(prompt, np.ndarray):
                    submit(dialogue, prompt)
                else:
                    ended[dialogue.number] = dialogue.record()
            journal.append(ended)
            waiting -= len(ended)
            tally.tokens, tally.seconds, tally.tau = server.tokens, time.monotonic() - start, server.tau
            say(tally, waiting)
        if server.dead_draft:
            warnings.warn("the draft's logits are not finite; the text is the target's, without speed-up", stacklevel=2)
        journal.finish(_counted(journal, tally))
    finally:
        journal.close()
    return tally


def seed_of(seed: int, index: int, turn: int) -> int:
    """The seed of an answer, 0 .. 2**64-1: independent streams for every (seed, index of the record, turn)."""
    return int(np.random.SeedSequence((seed, index, turn)).generate_state(1, np.uint64)[0])


def _items(
    source: Source, found: set[int], tally: Tally, progress: Callable[[Iterable[Any]], Iterable[Any]]
) -> Iterator[tuple[int, str, Any]]:
    """(index, where, record) of this share's records that have no result yet."""
    first, count = source.share
    records = read_records(source.name, split=source.split, on_bad_line=tally.add_bad_line if source.skip_bad_lines else None)
    for number, (where, record) in enumerate(progress(islice(records, source.limit))):
        if number % count == first:
            tally.records += 1
            if number not in found:
                yield number, where, record


def _open(
    tokenizer: PreTrainedTokenizerBase, source: Source, longest: int, item: tuple[int, str, Any]
) -> tuple[_Dialogue, np.ndarray] | ConversationError:
    """A record as a conversation whose first question is asked, and that prompt's ids; or why it cannot be."""
    number, where, record = item
    try:
        turns = questions(record, source.format or preset_format(source.name), where)
    except ConversationError as error:
        return error
    if source.system is not None and not any(message["role"] == "system" for turn in turns for message in turn):
        turns[0].insert(0, {"role": "system", "content": source.system})
    keep = {key: record[key] for key in ("id", "source") if isinstance(record.get(key), (str, int))}
    dialogue = _Dialogue(number, where, {**keep, "index": number}, turns[: 1 if source.turns == "first" else None])
    prompt = _next_prompt(tokenizer, dialogue, longest)
    if prompt is None:
        return ConversationError("no question", where)
    return prompt if isinstance(prompt, ConversationError) else (dialogue, prompt)


def _next_prompt(tokenizer: PreTrainedTokenizerBase, dialogue: _Dialogue, longest: int) -> np.ndarray | ConversationError | None:
    """Asks the next question: the prompt a server would send, int32 [n]. None when there is none; or why it cannot be asked."""
    if not dialogue.waiting:
        return None
    messages = [*dialogue.messages, *dialogue.waiting.pop(0)]
    try:
        ids = chat_ids(tokenizer, messages)
    except Exception as error:  # a template is a program: what it raises for messages it does not like is anybody's guess
        return ConversationError("the template refuses the conversation", f"{dialogue.where}: {error}")
    if len(ids) > longest:
        return ConversationError("the prompt is too long", f"{dialogue.where}: {len(ids)} tokens, limit {longest}")
    dialogue.messages = messages
    return np.array(ids, np.int32)


def _take(tokenizer: PreTrainedTokenizerBase, dialogue: _Dialogue, answer: Answer) -> bool:
    """Puts the answer into its conversation; False when the conversation cannot go on behind it."""
    if answer.finish_reason == BROKEN:
        # The question goes too: a conversation ends with an answer.
        while dialogue.messages and dialogue.messages[-1]["role"] != "assistant":
            dialogue.messages.pop()
        return False
    written = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
    text = str(tokenizer.decode(written, skip_special_tokens=True))
    dialogue.messages.append({"role": "assistant", "content": text})
    dialogue.response_ids.append(answer.tokens)
    dialogue.reasons.append(answer.finish_reason)
    return answer.finish_reason == "stop"


def _counted(journal: Journal, tally: Tally) -> Iterator[dict[str, Any]]:
    """The conversations kept, by record, counted on their way."""
    for _, result in journal.results():
        if "dropped" in result:
            tally.drop("the target's logits were not finite", result["where"])
            continue
        reasons = [result["finish_reason"]] if isinstance(result["finish_reason"], str) else result["finish_reason"]
        ids = result["response_ids"] if len(reasons) > 1 else [result["response_ids"]]
        tally.kept += 1
        tally.answers += len(reasons)
        tally.cut += reasons.count("length")
        tally.response_tokens += sum(map(len, ids))
        yield result
    if not tally.kept:
        raise DataError(f"no conversation could be kept\n{tally}")
