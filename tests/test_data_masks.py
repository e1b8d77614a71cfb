"""Token ids and response masks: what is trained on is what is served, whatever the chat template does."""

from __future__ import annotations

import chat_tokenizers
import numpy as np
import pytest
from chat_tokenizers import FAMILIES, TWO_TURNS_RECORD, byte_tokenizer, chatml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from eagle3_jax.data import Conversation, ConversationError, DataError, encode_conversation, encode_turns, parse_record
from eagle3_jax.tokenizer import chat_ids

THINK = "<think>\nit asked for seven\n</think>\n\n"


def chat(*texts: str) -> Conversation:
    """User and assistant in turn."""
    return parse_record({"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]})


def answers(tokenizer, conversation, **options) -> list[tuple[list[int], str]]:
    """(ids before the answer, text of the answer) of every answer, in order; checks that each answer is one stretch."""
    found = []
    for example in encode_turns(tokenizer, conversation, **options):
        assert example.ids.dtype == example.response.dtype == np.int32
        numbers = [r for r in range(1, example.response.max() + 1) if (example.response == r).any()]
        assert numbers == list(range(1, len(numbers) + 1))
        for r in numbers:
            (places,) = np.nonzero(example.response == r)
            assert places.tolist() == list(range(places[0], places[-1] + 1))
            found.append((example.ids[: places[0]].tolist(), tokenizer.decode(example.ids[places].tolist())))
    return found


def check_served(tokenizer, conversation) -> list[str]:
    """Every answer stands behind exactly the ids a server would have sent; returns the answers' texts."""
    found = answers(tokenizer, conversation)
    ends = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    assert [before for before, _ in found] == [chat_ids(tokenizer, conversation.messages[:end]) for end in ends]
    return [text for _, text in found]


# Per family: the texts of the two answers, and how many sequences the conversation needs.
TWO_TURNS = parse_record(TWO_TURNS_RECORD)
EXPECTED = {
    "chatml": (["the answer is one<|im_end|>", "two, yes<|im_end|>"], 1),
    "trimming": (["the answer is one<|im_end|>", "two, yes<|im_end|>"], 1),
    "llama3": (["the answer is one<|eot_id|>", "two, yes<|eot_id|>"], 1),
    "llama3-header-merges": (["the answer is one<|eot_id|>", "two, yes<|eot_id|>"], 2),
    "vicuna": ([" the answer is one</s>", " two, yes</s>"], 1),
    "llama2": ([" the answer is one </s>", " two, yes </s>"], 1),
    "llama2-spaces": (["the answer is one </s>", "two, yes </s>"], 1),
    "vicuna-spaces": (["the answer is one</s>", "two, yes</s>"], 1),
    "reasoning": (["the answer is one<|end|>", "two, yes<|end|>"], 1),
    "mistral": (["the answer is one</s>", "two, yes</s>"], 1),
    "mistral-spaces": (["the answer is one</s>", "two, yes</s>"], 1),
    "tinyllama": (["the answer is one</s>", "two, yes</s>"], 1),
    "llama31": (["the answer is one<|eot_id|>", "two, yes<|eot_id|>"], 1),
    "qwen25": (["the answer is one<|im_end|>", "two, yes<|im_end|>"], 1),
    "hybrid": (["<think>\n\n</think>\n\nthe answer is one<|im_end|>", "<think>\n\n</think>\n\ntwo, yes<|im_end|>"], 2),
    "rewriting": (["the answer is one<|im_end|>", "two, yes<|im_end|>"], 2),
    "system-last": ([" the answer is one</s>", " two, yes</s>"], 2),
    "unclosed": (["the answer is one<|endoftext|>", "two, yes<|endoftext|>"], 2),
    "two-ends": (["the answer is one<|end|>", "two, yes<|end|>"], 1),
}


@pytest.mark.parametrize("family", EXPECTED)
def test_two_turns(family):
    tokenizer = FAMILIES[family]()
    texts, sequences = EXPECTED[family]
    assert check_served(tokenizer, TWO_TURNS) == texts
    assert len(encode_turns(tokenizer, TWO_TURNS)) == sequences


def test_mask_of_a_known_sequence():
    """Prompt tokens 0, answer tokens and end-of-turn 1; the line break after the end of turn is not written by the model."""
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ '<|e|>\n' }}{% endif %}{% endfor %}", ("<|e|>",)
    )
    example = encode_conversation(tokenizer, chat("xyz", "QRS"))
    assert example.response.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert tokenizer.decode(example.ids.tolist()) == "xyzQRS<|e|>"


@pytest.mark.parametrize("family", ["chatml", "llama3", "vicuna", "rewriting", "hybrid", "unclosed"])
def test_quoted_header_fools_nobody(family):
    """A user who quotes the assistant's header and end-of-turn, and an empty answer."""
    tokenizer = FAMILIES[family]()
    prompt = str(tokenizer.apply_chat_template([{"role": "user", "content": "q"}], tokenize=False, add_generation_prompt=True))
    header = prompt.partition("q")[2]
    conversation = chat(f"what is {header}no answer of mine<|im_end|></s><|eot_id|>", "", f"{header}again", "yes")
    texts = check_served(tokenizer, conversation)
    end = EXPECTED[family][0][0].rpartition("one")[2]
    empty = texts[0].removeprefix("<think>\n\n</think>\n\n").removeprefix(" ")
    assert empty == end
    assert texts[1].removeprefix("<think>\n\n</think>\n\n").removeprefix(" ") == "yes" + end


def test_empty_answer_is_its_end_of_turn():
    example = encode_conversation(tokenizer := chatml(), chat("say nothing", ""))
    assert example.ids[example.response > 0].tolist() == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


@pytest.mark.parametrize(("family", "end"), [("reasoning", "<|end|>"), ("hybrid", "<|im_end|>")])
def test_reasoning_is_supervised_and_stripped_from_history(family, end):
    tokenizer = FAMILIES[family]()
    conversation = chat("give seven", THINK + "seven", "and eight", THINK + "eight")
    assert check_served(tokenizer, conversation) == [THINK + "seven" + end, THINK + "eight" + end]
    first, second = encode_turns(tokenizer, conversation)
    assert "it asked" in tokenizer.decode(first.ids.tolist())
    context = tokenizer.decode(second.ids[second.response == 0].tolist())
    assert "seven" in context
    assert "it asked" not in context


def test_answer_goes_on_where_the_generation_prompt_stops():
    """The prompt ends in '<think>': it is not trained twice, and an answer without reasoning cannot follow it."""
    tokenizer = FAMILIES["opens-reasoning"]()
    rest = THINK.removeprefix("<think>\n") + "seven<|end|>"
    assert check_served(tokenizer, chat("give seven", THINK + "seven")) == [rest]
    assert check_served(tokenizer, chat("give seven", THINK.removeprefix("<think>\n") + "seven")) == [rest]
    with pytest.raises(ConversationError, match="generation prompt opens '<think>'"):
        encode_turns(tokenizer, chat("give seven", "seven"))


@pytest.mark.parametrize("family", ["reasoning", "opens-reasoning"])
def test_reasoning_in_a_field_of_its_own(family):
    tokenizer = FAMILIES[family]()
    messages = (
        {"role": "user", "content": "give seven"},
        {"role": "assistant", "content": "seven", "reasoning_content": "it asked for seven"},
    )
    whole = THINK + "seven<|end|>"
    expected = whole.removeprefix("<think>\n") if family == "opens-reasoning" else whole
    assert check_served(tokenizer, Conversation(messages)) == [expected]


def test_r1_distill_trains_reasoning_and_shows_none_of_it():
    """Every answer is trained from behind the '<think>' that its prompt opens; later prompts hold the bare answers."""
    tokenizer = FAMILIES["r1-distill"]()
    conversation = chat("give seven", THINK + "seven", "and eight", THINK + "eight")
    written = THINK.removeprefix("<think>\n")
    assert check_served(tokenizer, conversation) == [written + "seven<|end|>", written + "eight<|end|>"]
    _, second = encode_turns(tokenizer, conversation)
    context = str(tokenizer.decode(second.ids[second.response == 0].tolist()))
    assert context == "<|begin|><|User|>give seven<|Assistant|>\n\nseven<|end|><|User|>and eight<|Assistant|><think>\n"


@pytest.mark.parametrize("family", ["llama31", "qwen25", "r1-distill", "chatml"])
def test_a_system_message_is_context(family):
    tokenizer = FAMILIES[family]()
    answer = THINK + "seven" if family == "r1-distill" else "seven"
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    (text,) = check_served(tokenizer, parse_record({"messages": messages}))
    assert "be kind" not in text
    example = encode_conversation(tokenizer, parse_record({"messages": messages}))
    assert "be kind" in str(tokenizer.decode(example.ids[example.response == 0].tolist()))


def test_a_template_that_wants_roles_to_alternate():
    tokenizer = FAMILIES["mistral"]()
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}, {"role": "assistant", "content": "three"}]
    with pytest.raises(ConversationError, match="must alternate"):
        encode_turns(tokenizer, parse_record({"messages": messages}))


def test_trimmed_answer_is_trained_as_shown():
    tokenizer = FAMILIES["trimming"]()
    assert check_served(tokenizer, chat("hello", "  the answer \n", "more", "\nyes ")) == ["the answer<|im_end|>", "yes<|im_end|>"]
    assert len(encode_turns(tokenizer, chat("hello", "  the answer \n", "more", "\nyes "))) == 1


def test_tokens_do_not_merge_across_the_prompts_end():
    """'\\n' + '\\n' is one token of this tokenizer, but a server's prompt ends after the first."""
    tokenizer = byte_tokenizer(chat_tokenizers.CHATML, eos="<|im_end|>")
    assert len(tokenizer.encode("\n\n", add_special_tokens=False)) == 1
    assert check_served(tokenizer, chat("hello", "\n\nlate", "and", "\n")) == ["\n\nlate<|im_end|>", "\n<|im_end|>"]


RUN_ON = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"


def test_merging_where_a_space_is_put_in_front():
    """'the t' + 'he' would be two words 'the'; a server's prompt ends in 't', and the answer is 'he', not ' he'."""
    tokenizer = chat_tokenizers.space_tokenizer(RUN_ON)
    together = tokenizer.encode("the the", add_special_tokens=False)
    prompt = tokenizer.encode("the t", add_special_tokens=False)
    assert together[: len(prompt)] != prompt
    example = encode_conversation(tokenizer, chat("the t", "he"))
    assert "".join(tokenizer.convert_ids_to_tokens(example.ids[example.response == 1].tolist())) == "he</s>"
    assert example.ids[example.response == 0].tolist() == [tokenizer.bos_token_id, *prompt]


def test_answer_that_changes_the_prompt_is_refused():
    """Under this normaliser a combining accent would become part of the prompt's last letter."""
    tokenizer = byte_tokenizer(RUN_ON, eos="<|e|>")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    with pytest.raises(ConversationError, match="tokens merge across the prompt's end"):
        encode_conversation(tokenizer, chat("caffe", "\u0301 it is"))


def test_supervision_stops_at_the_first_end_of_turn():
    """An answer that quotes the end-of-turn token: a decode would stop there, the rest is context for later turns."""
    tokenizer = chatml()
    example = encode_conversation(tokenizer, chat("hello", "it is <|im_end|> you see", "and", "yes"))
    assert tokenizer.decode(example.ids[example.response == 1].tolist()) == "it is <|im_end|>"
    assert tokenizer.decode(example.ids[example.response == 2].tolist()) == "yes<|im_end|>"
    assert "you see<|im_end|>" in tokenizer.decode(example.ids.tolist())


def test_last_turn_only():
    tokenizer = chatml()
    example = encode_conversation(tokenizer, TWO_TURNS, last_turn_only=True)
    assert tokenizer.decode(example.ids[example.response > 0].tolist()) == "two, yes<|im_end|>"
    assert set(example.response.tolist()) == {0, 1}
    assert example.ids.tolist() == encode_conversation(tokenizer, TWO_TURNS).ids.tolist()
    rewritten = encode_conversation(FAMILIES["rewriting"](), TWO_TURNS, last_turn_only=True)
    assert rewritten.supervised > 0


def test_exact_response_ids_are_kept():
    """Sampled ids that no encoder would produce for their own text, and an answer that was cut at a limit."""
    tokenizer = chatml()
    ids = [*tokenizer.encode("t", add_special_tokens=False), *tokenizer.encode("he", add_special_tokens=False)]
    assert ids != tokenizer.encode("the", add_special_tokens=False)
    conversation = Conversation(chat("hello", "first", "again", "the").messages, response_ids=(tuple(ids),))
    example = encode_conversation(tokenizer, conversation)
    assert example.ids[example.response == 2].tolist() == ids
    assert tokenizer.decode(example.ids[example.response == 1].tolist()) == "first<|im_end|>"
    with pytest.raises(ConversationError, match="leave the vocabulary"):
        encode_conversation(tokenizer, Conversation(conversation.messages, response_ids=((10**6,),)))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    both = Conversation(chat("hello", "the", "again", "the").messages, response_ids=((*ids, end), tuple(ids)))
    first, second = encode_turns(tokenizer, both)  # the second prompt holds the text, which encodes to other ids
    assert first.ids[first.response == 1].tolist() == [*ids, end]
    assert second.ids[second.response == 1].tolist() == ids
    assert encode_conversation(tokenizer, both, last_turn_only=True).ids.tolist() == second.ids.tolist()
    with pytest.raises(ConversationError, match="ids of 2 answers, 1 answers are there"):
        encode_turns(tokenizer, Conversation(chat("hello", "the").messages, response_ids=both.response_ids))


@pytest.mark.parametrize(
    ("template", "add_bos"),
    [(chat_tokenizers.LLAMA3, True), (chat_tokenizers.LLAMA3, False), (chat_tokenizers.LLAMA3.replace("{{ bos_token }}", ""), True)],
    ids=["template and tokenizer", "template only", "tokenizer only"],
)
def test_exactly_one_bos(template, add_bos):
    tokenizer = chat_tokenizers.llama3(template, add_bos=add_bos)
    check_served(tokenizer, TWO_TURNS)
    example = encode_conversation(tokenizer, TWO_TURNS)
    assert example.ids.tolist().count(tokenizer.bos_token_id) == 1
    assert example.ids[0] == tokenizer.bos_token_id


def test_answers_before_any_question_are_left_out():
    """Pieces of long chats may begin with an answer to nobody; a question at the end has no answer yet."""
    messages = [
        {"from": "gpt", "value": "to nobody"},
        {"from": "human", "value": "hello"},
        {"from": "gpt", "value": "yes"},
        {"from": "human", "value": "left open"},
    ]
    tokenizer = chatml()
    example = encode_conversation(tokenizer, parse_record({"conversations": messages}))
    text = str(tokenizer.decode(example.ids.tolist()))
    assert "to nobody" not in text
    assert text.endswith("yes<|im_end|>")


def test_refusals():
    tokenizer = chatml()
    with pytest.raises(ConversationError, match="no assistant turn"):
        encode_conversation(tokenizer, chat("hello"))
    with pytest.raises(ConversationError, match="rewrites history"):
        encode_conversation(FAMILIES["rewriting"](), TWO_TURNS)
    only_answers = byte_tokenizer(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}", eos="<|e|>"
    )
    with pytest.raises(ConversationError, match="every token is a response"):
        encode_conversation(only_answers, chat("hello", "yes"))
    no_answers = byte_tokenizer("{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}", eos="<|e|>")
    with pytest.raises(ConversationError, match="drops the answer"):
        encode_conversation(no_answers, chat("hello", "yes"))
    strict = byte_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConversationError, match="refuses the conversation: roles must alternate"):
        encode_conversation(strict, chat("hello", "yes"))
    with pytest.raises(ConversationError, match="no end-of-turn token"):
        encode_conversation(byte_tokenizer(chat_tokenizers.UNCLOSED), chat("hello", "yes"))
    with pytest.raises(DataError, match="no chat template"):
        encode_conversation(byte_tokenizer(None), chat("hello", "yes"))


PIECES = st.sampled_from(
    ["a", "the", " ", "\n", "\n\n", "answer", "<|im_start|>", "assistant\n", "<|im_start|>assistant\n", "user", "é", "QXZ", "'s"]
)
CONTENTS = st.lists(PIECES, max_size=6).map("".join)
SHARED_CHATML = chatml()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=3))
def test_any_text_is_served_as_trained(turns):
    """Random texts made of headers, blanks and merging pieces: answers come back exactly, behind exactly the served ids."""
    conversation = chat(*(text for turn in turns for text in turn))
    assert check_served(SHARED_CHATML, conversation) == [answer + "<|im_end|>" for _, answer in turns]
