"""Small tokenizers, built on the spot, and chat templates of the kinds that exist in the wild."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eagle3_jax.tokenizer import LLAMA3_SPLIT

TEXT = [
    "the assistant answers what the user asked, and the system said hello there",
    "USER: hello there ASSISTANT: the answer is the answer, is it not? yes, it is",
    "one two three four five six seven eight nine ten\n\n\nuser\nassistant\nsystem",
]

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = CHATML.replace("m['content']", "m['content'] | trim")
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
VICUNA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% else %}{{ m['content'] + ' ' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# The space before an answer and the one before its end belong to what the model writes; every turn begins with BOS.
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# DeepSeek-R1: reasoning is cut from every answer shown, the last one included.
REASONING = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}"
    "{% else %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)
OPENS_REASONING = REASONING.replace("{{ '<|Assistant|>' }}", "{{ '<|Assistant|><think>\n' }}")
# Qwen3: reasoning is shown after the last question only, where its place is held open by an empty pair of tags.
HYBRID = (
    "{%- set last = namespace(user=0) -%}{%- for m in messages -%}"
    "{%- if m['role'] == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\n' -}}{%- if m['role'] == 'assistant' -%}"
    "{%- set answer = m['content'].split('</think>')[-1].lstrip('\n') -%}{%- if loop.index0 > last.user -%}"
    "{%- set thought = m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m['content'] else '' -%}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' + answer -}}"
    "{%- else -%}{{- answer -}}{%- endif -%}{%- else -%}{{- m['content'] -}}{%- endif -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
# History is told in other words than it was spoken in.
REWRITING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ '<|im_start|>earlier\n' + m['content'] | upper + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The system message is put before the question, but only while the question is the last message: a finished chat shows another prompt.
SYSTEM_LAST = (
    "{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] + ' ' %}{% else %}{% set s = 'be kind. ' %}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + (s if loop.last else '') + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# No answer is closed: the next header ends it.
UNCLOSED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# An end of text after the last end of turn.
TWO_ENDS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# Mistral 7B: roles must alternate, and a space stands between an answer's end and the next question.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token + ' ' }}{% endif %}{% endfor %}"
)
# TinyLlama, Zephyr: line breaks of the template's own lines, and turns that all end in the end-of-sequence token.
TINYLLAMA = (
    "{% for m in messages %}\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}\n"
    "{% elif m['role'] == 'assistant' %}\n{{ '<|assistant|>\n' + m['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
# LLaMA 3.1 and 3.2: a system turn with dates, written whether there is a system message or not.
LLAMA31 = (
    "{{- bos_token }}{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: ' + date + '\n\n' }}"
    "{{- system + '<|eot_id|>' }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
# Qwen2.5: its own system message where there is none, another one with tools.
QWEN25 = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools<|im_end|>\n' }}{%- elif messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'system' and not loop.first)"
    " or (m.role == 'assistant' and not m.tool_calls) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# DeepSeek-R1-Distill: the system message stands bare behind BOS, answers lose their reasoning, the prompt opens the next one's.
R1_DISTILL = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(system='') %}"
    "{%- for m in messages %}{%- if m['role'] == 'system' %}{% set ns.system = m['content'] %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system }}{%- for m in messages %}{%- if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}{%- endif %}"
    "{%- if m['role'] == 'assistant' and m['content'] is not none %}{% set content = m['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + content + '<|end|>' }}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)

TWO_TURNS_RECORD = {
    "messages": [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "the answer is one"},
        {"role": "user", "content": "and two?"},
        {"role": "assistant", "content": "two, yes"},
    ]
}


def byte_tokenizer(
    template: str | None,
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"),
    *,
    bos: str | None = None,
    eos: str | None = None,
    add_bos: bool = False,
    pad: str | None = None,
    split: str | None = None,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, so that every text encodes and some tokens can merge; `split`: a pattern other than GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split:
        pieces = pre_tokenizers.Split(Regex(split), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    names = list(dict.fromkeys([*special, *(token for token in (bos, eos) if token)]))
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=names, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return _wrap(tokenizer, template, bos, eos, add_bos, pad)


def space_tokenizer(template: str, *, bos: str = "<s>", eos: str = "</s>") -> PreTrainedTokenizerFast:
    """A tokenizer of SentencePiece's kind: a space is put in front of whatever is encoded."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    alphabet = sorted({c for line in TEXT for c in line.replace(" ", "▁")} | set("[]/INSTbkyr.▁\n"))
    trainer = trainers.BpeTrainer(
        vocab_size=200, initial_alphabet=alphabet, special_tokens=["<unk>", bos, eos], show_progress=False, max_token_length=4
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return _wrap(tokenizer, template, bos, eos, True, None)


def _wrap(
    tokenizer: Tokenizer, template: str | None, bos: str | None, eos: str | None, add_bos: bool, pad: str | None
) -> PreTrainedTokenizerFast:
    if add_bos:
        assert bos is not None
        tokenizer.add_special_tokens([AddedToken(bos, special=True, normalized=False)])
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    names = {name: token for name, token in (("bos_token", bos), ("eos_token", eos), ("pad_token", pad)) if token}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False, **names)


def chatml() -> PreTrainedTokenizerFast:
    """The tokenizer most tests use: ChatML with a default system message, ended by <|im_end|>."""
    return byte_tokenizer(CHATML, bos="<|im_start|>", eos="<|im_end|>")


def llama3(template: str = LLAMA3, *, add_bos: bool = True, split: str | None = LLAMA3_SPLIT) -> PreTrainedTokenizerFast:
    """LLaMA 3's special tokens, template and way to split text."""
    special = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    return byte_tokenizer(template, special, bos="<|begin|>", eos="<|eot_id|>", add_bos=add_bos, split=split)


FAMILIES = {
    "chatml": chatml,
    "trimming": lambda: byte_tokenizer(TRIMMING, eos="<|im_end|>"),
    "llama3": llama3,
    # The two line breaks of the header are one token at the end of the text, and two before a word: history differs from its own prompt.
    "llama3-header-merges": lambda: llama3(split=None),
    "vicuna": lambda: byte_tokenizer(VICUNA, (), bos="<s>", eos="</s>", add_bos=True),
    "llama2": lambda: byte_tokenizer(LLAMA2, (), bos="<s>", eos="</s>", add_bos=True),
    "llama2-spaces": lambda: space_tokenizer(LLAMA2),
    "vicuna-spaces": lambda: space_tokenizer(VICUNA),
    "reasoning": lambda: byte_tokenizer(REASONING, ("<|User|>", "<|Assistant|>"), bos="<|begin|>", eos="<|end|>", add_bos=True),
    "opens-reasoning": lambda: byte_tokenizer(OPENS_REASONING, ("<|User|>", "<|Assistant|>"), bos="<|begin|>", eos="<|end|>", add_bos=True),
    "hybrid": lambda: byte_tokenizer(HYBRID, eos="<|im_end|>"),
    "mistral": lambda: byte_tokenizer(MISTRAL, (), bos="<s>", eos="</s>", add_bos=True),
    "mistral-spaces": lambda: space_tokenizer(MISTRAL),
    "tinyllama": lambda: byte_tokenizer(TINYLLAMA, (), bos="<s>", eos="</s>", add_bos=True),
    "llama31": lambda: llama3(LLAMA31),
    "qwen25": lambda: byte_tokenizer(QWEN25, eos="<|im_end|>"),
    "r1-distill": lambda: byte_tokenizer(R1_DISTILL, ("<|User|>", "<|Assistant|>"), bos="<|begin|>", eos="<|end|>", add_bos=True),
    "rewriting": lambda: byte_tokenizer(REWRITING, eos="<|im_end|>"),
    "system-last": lambda: byte_tokenizer(SYSTEM_LAST, (), eos="</s>"),
    "unclosed": lambda: byte_tokenizer(UNCLOSED, ("<|user|>", "<|assistant|>", "<|system|>"), eos="<|endoftext|>"),
    "two-ends": lambda: byte_tokenizer(TWO_ENDS, ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), eos="<|endoftext|>"),
}
