"""A chat: messages through the chat template, one session whose caches keep what was said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eagle3_jax.decoding.session import Session
from eagle3_jax.decoding.stream import Stream
from eagle3_jax.drafting import Draft
from eagle3_jax.prompts import PromptError
from eagle3_jax.target import Target
from eagle3_jax.tokenizer import chat_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Conversation:
    """messages: what has been said, as {"role", "content"}. Every question is answered as `generate` would answer the whole conversation,
    but of its tokens only those run that the caches do not hold yet.
    """

    def __init__(self, target: Target, draft: Draft | None, tokenizer: PreTrainedTokenizerBase, system: str | None = None):
        """Raises PromptError for a tokenizer without a chat template."""
        if not tokenizer.chat_template:
            raise PromptError("a conversation needs a tokenizer with a chat template")
        self.session = Session(target, draft)
        self.tokenizer = tokenizer
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.restart()

    def restart(self) -> None:
        """A new conversation. What the caches hold stays useful: the new one may begin alike."""
        self.session.close()
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, text: str, **options: Any) -> Stream:
        """The answer as a stream; options are those of `eagle3_jax.stream`. Tell `hear` what it brought before the next question.

        Raises PromptError when the conversation has outgrown the target's context; it is then as it was before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = chat_ids(self.tokenizer, messages)
        context = self.session.target.config.max_position
        if len(ids) >= context:
            raise PromptError(
                f"the conversation has {len(ids)} tokens, more than fit into the target's context of {context}: begin a new one"
            )
        stream = self.session.stream(ids, **options)
        self.messages = messages
        return stream

    def hear(self, tokens: Sequence[int]) -> str:
        """Adds the answer, whole or cut short, to the conversation; returns its text."""
        text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": text})
        return text
