"""Token ids and loss masks of a conversation, from the chat template.

The rule: what is trained on is what is served. For each assistant turn the template is asked for the prompt a server would send (the
messages before the turn, generation prompt included); that text, encoded alone, is context. What follows is the response: the ids a
model would have to emit, up to and including its end-of-turn token. Nothing is searched for in the text, so a user who quotes an
assistant header fools nobody, no generation tags are needed, and no token merges across the prompt's end: it never does when serving.

Templates that rewrite history (strip reasoning, trim, drop turns) make an earlier turn's ids differ from what a later prompt shows. As
long as a turn's ids are a prefix of the next turn's, the turns share one example; where not, the next turn starts an example of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3_jax.data.conversations import Conversation, ConversationError
from eagle3_jax.data.sources import DataError
from eagle3_jax.tokenizer import encode_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for an answer when the template is asked what it writes around one. Plain letters: trimming and splitting leave it whole.
_PROBE = "QXZANSWERZXQ"


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One training sequence of n tokens.

    ids: int32 [n]. response: int32 [n], 0 for context (prompts, headers, whatever the model does not write), r >= 1 for tokens of the
    r-th answer in this example, its end-of-turn token included.
    """

    ids: np.ndarray
    response: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def supervised(self) -> int:
        """Number of response tokens."""
        return int(np.count_nonzero(self.response))


@dataclasses.dataclass(frozen=True)
class _Turn:
    """One answer as served: prompt ids, answer ids, and how many of the latter belong to the answer (up to its first end-of-turn)."""

    prompt: list[int]
    answer: list[int]
    length: int


def encode_conversation(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, *, last_turn_only: bool = False) -> Example:
    """The conversation as ONE example.

    Raises ConversationError when there is no assistant turn (nothing would be supervised), when everything would be, or when the template
    rewrites history so that one sequence cannot hold all turns (use `encode_turns`, or `last_turn_only`).
    """
    examples = encode_turns(tokenizer, conversation, last_turn_only=last_turn_only)
    if len(examples) > 1:
        raise ConversationError(
            "the template rewrites history",
            f"{conversation.where or 'conversation'}: needs {len(examples)} sequences; use encode_turns, or last_turn_only=True",
        )
    return examples[0]


def encode_turns(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, *, last_turn_only: bool = False) -> list[Example]:
    """The conversation as few examples as its template allows, in order (see the module's docstring).

    `last_turn_only`: only the last answer is supervised. Raises ConversationError for a conversation that cannot be used.
    """
    messages = _from_first_user(conversation)
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not ends:
        raise ConversationError("no assistant turn", conversation.where)
    given = conversation.response_ids
    if len(given) > len(ends):
        raise ConversationError("bad response_ids", f"{conversation.where}: ids of {len(given)} answers, {len(ends)} answers are there")
    sampled: list[tuple[int, ...] | None] = [*[None] * (len(ends) - len(given)), *given]
    examples: list[Example] = []
    shared: list[_Turn] = []
    for i, exact in list(zip(ends, sampled, strict=True))[-1 if last_turn_only else 0 :]:
        turn = _encode_turn(tokenizer, messages[: i + 1], exact, conversation.where)
        if shared and turn.prompt[: len(shared[-1].prompt) + len(shared[-1].answer)] != shared[-1].prompt + shared[-1].answer:
            examples.append(_join(shared, conversation.where))
            shared = []
        shared.append(turn)
    return [*examples, _join(shared, conversation.where)]


def _join(turns: list[_Turn], where: str) -> Example:
    """Turns of which each is a prefix of the next, as one example."""
    last = turns[-1]
    ids = np.array(last.prompt + last.answer, np.int32)
    response = np.zeros(len(ids), np.int32)
    for r, turn in enumerate(turns, 1):
        response[len(turn.prompt) : len(turn.prompt) + turn.length] = r
    if response.all():
        raise ConversationError("every token is a response", f"{where}: the chat template writes no prompt before the answer")
    return Example(ids, response)


def _encode_turn(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], exact: tuple[int, ...] | None, where: str
) -> _Turn:
    """The last message's answer after the prompt a server would send for the messages before it."""
    prompt_text = _render(tokenizer, messages[:-1], generation_prompt=True)
    prompt = encode_plain(tokenizer, prompt_text)
    if exact is not None:
        if max(exact) >= len(tokenizer):
            raise ConversationError("response_ids leave the vocabulary", f"{where}: id {max(exact)}, the tokenizer has {len(tokenizer)}")
        return _Turn(prompt, list(exact), len(exact))
    text, end = _answer_text(tokenizer, messages, prompt_text, where)
    answer = [*_encode_after(tokenizer, prompt_text, prompt, text, where), end]
    return _Turn(prompt, answer, answer.index(end) + 1)


def _answer_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], prompt: str, where: str) -> tuple[str, int]:
    """What the model writes after `prompt`: the text before its end-of-turn token, and that token's id."""
    *history, last = messages
    _, found, after = _render(tokenizer, [*history, {"role": "assistant", "content": _PROBE}]).rpartition(_PROBE)
    if not found:
        raise ConversationError("the template drops the answer", where)
    closing, end = _end_of_turn(tokenizer, after)
    content, reasoning = last["content"], str(last.get("reasoning_content") or "").strip()
    full = _render(tokenizer, messages)
    if full.startswith(prompt) and full.endswith(after) and len(full) >= len(prompt) + len(after):
        body = full[len(prompt) : len(full) - len(after)]
        if content.strip() in body and reasoning in body:
            return body + closing, end
    # The template does not show the answer as it was written (it strips reasoning, say): the model still has to write all of it.
    if reasoning:
        content = f"<think>\n{reasoning}\n</think>\n\n{content}"
    served, shown = _headers(tokenizer, history)
    if shown.startswith(served):
        return shown[len(served) :] + content + closing, end
    # The generation prompt opens something that the template does not keep (typically <think>): the answer must go on from there.
    opened = served.removeprefix(shown).strip()
    if content.lstrip().startswith(opened):
        return content.lstrip()[len(opened) :].lstrip() + closing, end
    if opened.startswith("<") and "</" + opened[1:] in content:
        return content + closing, end
    raise ConversationError(f"the generation prompt opens {opened[-40:]!r}, and the answer does not go on from there", where)


def _headers(tokenizer: PreTrainedTokenizerBase, history: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """What the template writes between the last message of the history and an answer: in the prompt of a server, and in a finished chat."""
    asked = [*history[:-1], {**history[-1], "content": _PROBE}]
    _, _, served = _render(tokenizer, asked, generation_prompt=True).rpartition(_PROBE)
    finished, _, _ = _render(tokenizer, [*asked, {"role": "assistant", "content": _PROBE}]).rpartition(_PROBE)
    return served, finished.rpartition(_PROBE)[2]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, after: str) -> tuple[str, int]:
    """Text between an answer and its end-of-turn token, and the token's id: the first special token the template writes after an answer.

    Templates that close no turn (the next header closes it, or nothing does): the tokenizer's end-of-sequence token.
    """
    special = special_ids(tokenizer)
    for token_id in _encode(tokenizer, after):
        if token_id in special:
            return after.partition(str(tokenizer.convert_ids_to_tokens(token_id)))[0], token_id
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise ConversationError("no end-of-turn token", "the template closes no assistant turn and the tokenizer names no eos_token")
    return "", eos


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that no ordinary text encodes to: special and added tokens."""
    return frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)


def _encode_after(tokenizer: PreTrainedTokenizerBase, prompt: str, prompt_ids: list[int], text: str, where: str) -> list[int]:
    """Ids of `text` as a model would write them after the prompt.

    Encoding both together is right when the prompt's ids survive. Where tokens merge across the border, `text` is encoded alone, or behind
    a line break for tokenizers that put a space in front of whatever they encode.
    """
    if not text:
        return []
    together = encode_plain(tokenizer, prompt + text)
    if together[: len(prompt_ids)] == prompt_ids:
        return together[len(prompt_ids) :]
    whole = tokenizer.decode(together)
    line_break = _encode(tokenizer, "\n")
    for alone in (_encode(tokenizer, text), _encode(tokenizer, "\n" + text)[len(line_break) :]):
        if tokenizer.decode(prompt_ids + alone) == whole:
            return alone
    raise ConversationError("tokens merge across the prompt's end", where)


def _from_first_user(conversation: Conversation) -> list[dict[str, Any]]:
    """Messages without answers to nobody: ShareGPT cuts long chats into pieces that may begin with an answer."""
    messages = list(conversation.messages)
    start = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer", "assistant")), len(messages))
    return [message for message in messages[:start] if message["role"] != "assistant"] + messages[start:]


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], *, generation_prompt: bool = False) -> str:
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template and conversations need one: use an instruct model, or set its chat_template")
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation_prompt))
    except Exception as error:  # a template is a program: what it raises for messages it does not like is anybody's guess
        raise ConversationError("the template refuses the conversation", str(error)) from error


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
