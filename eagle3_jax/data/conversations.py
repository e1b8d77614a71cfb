"""Conversations: one record of any supported format becomes a list of chat messages.

Formats (each record is one JSON object):

    messages        {"messages": [{"role": "user", "content": "..."}, ...]}                    OpenAI, UltraChat
    conversations   {"conversations": [{"from": "human", "value": "..."}, ...]}                ShareGPT, OpenThoughts
    prompt          {"prompt": "..." or a list of messages, "response": "..."}
    turns           {"turns": ["...", ...]}   what users ask, without answers: only for `questions`

A record may carry `response_ids`: the exact token ids that were sampled for its last assistant turn, end-of-turn included when it stopped;
or a list of such lists, for its last assistant turns in order. They are used as they are; text that is decoded and encoded again does
not always give the same ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.data.sources import DataError, read_records

FORMATS = ("messages", "conversations", "prompt")

# Names of the speakers in ShareGPT files and their descendants.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


class ConversationError(DataError):
    """One conversation that cannot be used. `reason` is the short form under which a report counts it."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Conversation:
    """messages: dictionaries with `role` and `content` (further keys reach the chat template untouched).

    response_ids: exact ids of the last so many assistant turns, in order. where: file and line, for messages to a person.
    """

    messages: tuple[dict[str, Any], ...]
    response_ids: tuple[tuple[int, ...], ...] = ()
    where: str = ""


def parse_record(record: Mapping[str, Any], format: str | None = None, where: str = "") -> Conversation:
    """One record as a Conversation. `format` is one of FORMATS; None looks at the record's keys.

    Raises ConversationError when the record has no such key, an unknown speaker, or content that is not text.
    """
    format = _format(record, format, FORMATS, where)
    if format == "prompt":
        answer = record.get("response")
        if answer is None:
            raise ConversationError("no assistant turn", f"{where}: the record has a prompt but no response")
        messages = [*_messages(record, "prompt", where), {"role": "assistant", "content": _text(answer, where)}]
    else:
        messages = _messages(record, format, where)
    return Conversation(tuple(messages), _response_ids(record, where), where)


def questions(record: Mapping[str, Any], format: str | None = None, where: str = "") -> list[list[dict[str, Any]]]:
    """What is said to the assistant: per turn the messages before its answer, of any format, the answers of the record left out.

    Raises ConversationError as `parse_record` does, for a record that asks nothing, and for one with messages of tools: what a tool
    returned belongs to a call that another model made.
    """
    format = _format(record, format, (*FORMATS, "turns"), where)
    if format == "turns":
        turns = [[{"role": "user", "content": _text(text, where)}] for text in _listed(record, "turns", where)]
    else:
        turns = [[]]
        for message in _messages(record, format, where):
            if message["role"] == "tool":
                raise ConversationError("tools answer in the conversation", where)
            if message["role"] != "assistant":
                turns[-1].append(message)
            elif any(m["role"] == "user" for m in turns[-1]):
                turns.append([])
        if not turns[-1]:
            turns.pop()
    if not turns or any(not any(m["role"] == "user" and m["content"].strip() for m in turn) for turn in turns):
        raise ConversationError("no question", where)
    return turns


def load_conversations(source: str | Path, format: str | None = None) -> list[Conversation]:
    """All conversations of a file, a preset or a `datasets` name (see sources.py). Raises DataError naming the first broken record."""
    return [parse_record(record, format, where) for where, record in read_records(source)]


def _format(record: Any, format: str | None, known: Sequence[str], where: str) -> str:
    """The record's format, if it is one of those known."""
    if not isinstance(record, Mapping):
        raise ConversationError("not a JSON object", f"{where}: found {type(record).__name__}")
    if format is None:
        format = next((name for name in known if record.get(name) is not None), None)
    if format is None or format not in known or record.get(format) is None:
        raise ConversationError(
            "no conversation in the record", f"{where}: expected one of the keys {', '.join(known)}; found {', '.join(map(str, record))}"
        )
    return format


def _messages(record: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """The messages under the key, where a text is what a user says; the record's system prompt in front, where it has one of its own."""
    if key == "prompt" and isinstance(record[key], str):
        messages = [{"role": "user", "content": record[key]}]
    else:
        messages = [_message(item, where) for item in _listed(record, key, where)]
    system = record.get("system")
    if isinstance(system, str) and system and not any(m["role"] == "system" for m in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _listed(record: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
    value = record[key]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConversationError("no conversation in the record", f"{where}: {key} must be a list")
    return value


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise ConversationError("a message is not an object", f"{where}: found {type(item).__name__}")
    speaker = item.get("role", item.get("from"))
    role = _ROLES.get(str(speaker).lower())
    if role is None:
        raise ConversationError("unknown speaker", f"{where}: {speaker!r}")
    content = item.get("content", item.get("value"))
    if content is None and item.get("tool_calls"):
        content = ""
    rest = {key: value for key, value in item.items() if key not in ("role", "from", "content", "value") and value is not None}
    return {"role": role, "content": _text(content, where), **rest}


def _text(content: Any, where: str) -> str:
    """Text of a message; a list of text parts is joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and content and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise ConversationError("content is not text", f"{where}: {type(content).__name__}")


def _response_ids(record: Mapping[str, Any], where: str) -> tuple[tuple[int, ...], ...]:
    ids = record.get("response_ids")
    if ids is None:
        return ()
    if isinstance(ids, Sequence) and ids and isinstance(ids[0], int):
        ids = [ids]
    if not isinstance(ids, Sequence) or not ids or not all(_are_ids(turn) for turn in ids):
        raise ConversationError("bad response_ids", f"{where}: response_ids must be a list of token ids, or of such lists, none empty")
    return tuple(tuple(turn) for turn in ids)


def _are_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(type(i) is int and i >= 0 for i in value)
