"""Real sampled responses under a real chat template."""

from __future__ import annotations

import pytest

from eagle3_jax.data import Conversation, Report, encode_all, encode_conversation, load_conversations, read_records
from eagle3_jax.tokenizer import chat_ids, load_tokenizer
from eagle3_jax.vocab import count_tokens, coverage, select_vocab


@pytest.mark.slow
def test_smollm2_responses(shared_data):
    """Prompts as served, sampled ids verbatim, nothing dropped, the end of turn in the draft vocabulary."""
    path = shared_data / "responses.jsonl.gz"
    tokenizer = load_tokenizer("smollm2-135m")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for conversation in load_conversations(path)[:50]:
        example = encode_conversation(tokenizer, conversation)
        prompt = chat_ids(tokenizer, conversation.messages[:-1])
        (sampled,) = conversation.response_ids
        assert example.ids.tolist() == [*prompt, *sampled]
        assert example.response.tolist() == [0] * len(prompt) + [1] * len(sampled)
        again = encode_conversation(tokenizer, Conversation(conversation.messages))
        assert again.ids[: len(prompt)].tolist() == prompt
        assert tokenizer.decode(again.ids[len(prompt) :].tolist()) == conversation.messages[-1]["content"] + "<|im_end|>"
    report = Report()
    examples = encode_all(tokenizer, read_records(path), report)
    assert (report.kept, report.dropped.total(), report.supervised) == (3923, 0, 807_072)
    counts = count_tokens(examples, len(tokenizer))
    kept = select_vocab(counts, 8192)
    assert end in kept
    assert coverage(counts, kept) > 0.95
