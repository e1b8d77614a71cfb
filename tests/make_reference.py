"""Writes `tests/reference/*.npz`: numbers that Hugging Face's PyTorch models give. Needs torch and transformers, not JAX.

python tests/make_reference.py                      # the tiny models of tiny_checkpoints.py
python tests/make_reference.py --gguf FILE.gguf     # and SmolLM2-135M-Instruct from its GGUF file
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from tiny_checkpoints import (
    BASE,
    CASES,
    FAMILY_CASES,
    KEPT,
    NEW,
    PASS,
    TORCH_CASE,
    config_of,
    head_tensors,
    prompts_of,
    tensors_of,
    tokens_of,
    write_folder,
)

REFERENCE = Path(__file__).parent / "reference"
QUESTION = "Write a short story about a clockmaker who repairs 3 watches in 1872, then list the steps of her work."
LENGTH = 300


def tiny() -> None:
    """Logits [T, V] and the state entering the second block [T, D] of every tiny model."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    arrays = {}
    for case in CASES:
        config = config_of(case)
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), config, tensors_of(config))
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            out = model(torch.tensor(tokens_of(config))[None], output_hidden_states=True)
        arrays[f"{case}.logits"] = out.logits[0].numpy()
        arrays[f"{case}.tap1"] = out.hidden_states[1][0].numpy()
    np.savez_compressed(REFERENCE / "hf_tiny.npz", **arrays)


def families() -> None:
    """Of every family: logits [PASS / 3, V] of one pass, and the greedy continuation of each prompt, decoded alone with a cache."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    arrays = {}
    for case in FAMILY_CASES:
        config = config_of(case)
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), config, tensors_of(config))

            def load(folder: str = folder):
                # Anew for every text: a model remembers the longest context that its dynamic rope has seen.
                return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

            with torch.no_grad():
                arrays[f"{case}.logits"] = load()(torch.tensor(tokens_of(config, PASS))[None]).logits[0, KEPT].numpy()
                for i, prompt in enumerate(prompts_of(config)):
                    ids = torch.tensor([prompt])
                    out = load().generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        do_sample=False,
                        min_new_tokens=NEW,
                        max_new_tokens=NEW,
                        eos_token_id=None,
                        output_logits=True,
                        return_dict_in_generate=True,
                    )
                    top = torch.stack(out.logits)[:, 0].topk(2).values
                    arrays[f"{case}.text{i}"] = out.sequences[0, len(prompt) :].numpy().astype(np.int32)
                    arrays[f"{case}.gap{i}"] = np.float32((top[:, 0] - top[:, 1]).min())
    np.savez_compressed(REFERENCE / "hf_families.npz", **arrays)


def torch_files() -> None:
    """A target and a head in float16, as torch saves them; every storage type, and views that share or stride a storage."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.save({key: torch.tensor(array) for key, array in head_tensors()[1].items()}, REFERENCE / "torch_head.bin")
    target = {key: torch.tensor(array).to(torch.float16) for key, array in tensors_of(BASE | TORCH_CASE).items()}
    torch.save(target, REFERENCE / "torch_target.bin")
    base = torch.arange(24, dtype=torch.float32)
    kinds = {"f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64, "i32": torch.int32}
    kinds |= {"i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool}
    state = {name: torch.arange(6).reshape(2, 3).to(kind) for name, kind in kinds.items()}
    state |= {"tail": base[20:], "columns": base.reshape(4, 6)[:, 1::2], "transposed": base.reshape(4, 6).T, "scalar": torch.tensor(3.5)}
    state |= {"parameter": torch.nn.Parameter(base[:3]), "empty": torch.zeros(0, 3)}
    torch.save(state, REFERENCE / "torch_views.bin")
    torch.save(state, REFERENCE / "torch_legacy.bin", _use_new_zipfile_serialization=False)


def smollm2(path: Path) -> None:
    """Tokens [300] of a chat continued greedily; for each position the eight largest logits, 64 others and their log-sum-exp."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    chat = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False)
    prompt = torch.tensor(chat)[None]
    with torch.no_grad():
        ids = model.generate(prompt, do_sample=False, min_length=LENGTH, max_length=LENGTH, attention_mask=torch.ones_like(prompt))
        out = model(ids, output_hidden_states=True)
    logits = out.logits[0]
    top = logits.topk(8)
    sample = np.arange(64) * 768 + 11
    taps = np.stack([out.hidden_states[k][0, ::50].numpy() for k in (2, 15, 27)])
    np.savez_compressed(
        REFERENCE / "hf_smollm2.npz",
        tokens=ids[0].numpy().astype(np.int32),
        top_ids=top.indices.numpy().astype(np.int32),
        top_logits=top.values.numpy(),
        sample_ids=sample.astype(np.int32),
        sample_logits=logits[:, sample].numpy(),
        logsumexp=torch.logsumexp(logits, -1).numpy(),
        taps=taps,
        prompt_length=np.int32(prompt.shape[1]),
    )
    print(tokenizer.decode(ids[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    arguments = parser.parse_args()
    REFERENCE.mkdir(exist_ok=True)
    tiny()
    families()
    torch_files()
    if arguments.gguf:
        smollm2(arguments.gguf)


if __name__ == "__main__":
    main()
