"""Caches that outlive a request: every turn gives what `generate` gives for the whole text, and only the new tokens run."""

import numpy as np
import pytest
from tiny_models import VOCAB, tiny_draft, tiny_target

import eagle3_jax as e3
from eagle3_jax.decoding import segments
from eagle3_jax.prompts import PromptError

CHAIN = e3.Chain(3)
rng = np.random.default_rng(8)
FIRST = rng.integers(1, VOCAB, 50).tolist()
NEXT = rng.integers(1, VOCAB, 12).tolist()


@pytest.fixture(scope="module")
def target():
    return tiny_target(max_position=1024)


@pytest.fixture(scope="module")
def drafts(target):
    return {"plain": None, "head": tiny_draft(target), "model": e3.LanguageModelDraft.of(target, target)}


@pytest.mark.parametrize("name", ["plain", "head", pytest.param("model", marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_turns_equal_whole_texts(target, drafts, name, temperature, monkeypatch):
    draft = drafts[name]
    fed = []
    monkeypatch.setattr(segments.Segments, "feed", counting(segments.Segments.feed, fed))
    options = {"max_new_tokens": 20, "temperature": temperature, "tree": CHAIN, "eos_token_ids": []}
    session = e3.Session(target, draft)

    def turn(text, least):
        fed.clear()
        got = session.generate(text, **options)
        assert got.tokens == e3.generate(target, draft, [text], **options).tokens
        assert session.reused >= least and sum(fed) == len(text) - session.reused
        return text + got.tokens[0]

    said = turn(FIRST, 0)
    # All but the pending token and the last cycle's, whose pairs the draft does not hold yet.
    said = turn(said + NEXT, len(said) - 1 - CHAIN.length - 1)
    edited = [*said[:60], (said[60] + 1) % VOCAB, *NEXT]
    turn(edited, 55)  # parts in the middle of the first answer
    turn(NEXT, 0)  # begins otherwise
    turn(NEXT, len(NEXT) - 1)  # asked again


def counting(feed, counts):
    def counted(self, start, width):
        counts.append(int(np.clip(self.lengths - start, 0, width).max()))
        return feed(self, start, width)

    return counted


def test_an_interrupted_answer_leaves_the_session_usable(target, drafts):
    session = e3.Session(target, drafts["head"])
    options = {"max_new_tokens": 40, "tree": CHAIN, "eos_token_ids": []}
    whole = e3.generate(target, drafts["head"], [FIRST], **options).tokens[0]
    stream = session.stream(FIRST, cycles=1, **options)
    session.close()  # before any work
    assert stream.output.tokens == [[]] and next(stream, None) is None
    for count in (1, 4):
        for _, _event in zip(range(count), session.stream(FIRST, cycles=1, **options), strict=False):
            pass
        # Still open: the next request closes it.
    assert session.generate(FIRST + whole[:2], **options).tokens[0][:38] == whole[2:]
    assert session.reused >= len(FIRST) - 1
    next(session.stream(FIRST, **options))
    session.forget()
    assert session.reused == 0 and session.generate(FIRST, **options).tokens[0] == whole


def test_caches_lost_to_an_interrupt_are_made_anew(target, drafts):
    session = e3.Session(target, drafts["head"])
    options = {"max_new_tokens": 20, "tree": CHAIN, "eos_token_ids": []}
    want = session.generate(FIRST, **options)
    session._kept.cache.k[0].delete()
    assert session.generate(FIRST, **options) == want and session.reused == 0


@pytest.mark.slow
def test_a_conversation_is_the_chat_template_over_all_turns(target, drafts, tmp_path):
    from command_scripts import save_word_tokenizer
    from transformers import AutoTokenizer

    from eagle3_jax.decoding.conversation import Conversation
    from eagle3_jax.tokenizer import chat_ids

    small = tiny_target(max_position=1024, vocab_size=160)
    head = tiny_draft(small)
    save_word_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    talk = Conversation(small, head, tokenizer, system="w9")
    options = {"max_new_tokens": 20, "tree": CHAIN, "eos_token_ids": []}
    for text in ("w5 w6", "w7 " * 9, "w8"):
        before = chat_ids(tokenizer, [*talk.messages, {"role": "user", "content": text}])
        stream = talk.ask(text, **options)
        tokens = [token for event in stream for token in event.tokens]
        assert [tokens] == e3.generate(small, head, [before], **options).tokens
        said = talk.hear(tokens)
        assert talk.messages[-1] == {"role": "assistant", "content": said}
    assert talk.session.reused > 50
    with pytest.raises(PromptError, match="more than fit into the target's context of 1024"):
        talk.ask("w5 " * 1000)
    assert len(talk.messages) == 7
    talk.restart()
    assert talk.messages == [{"role": "system", "content": "w9"}]
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="chat template"):
        Conversation(small, head, tokenizer)
