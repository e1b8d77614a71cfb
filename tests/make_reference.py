"""Writes `tests/reference/*.npz`: logits that Hugging Face's PyTorch LLaMA gives. Needs torch and transformers, not JAX.

python tests/make_reference.py                      # the tiny models of tiny_checkpoints.py
python tests/make_reference.py --gguf FILE.gguf     # and SmolLM2-135M-Instruct from its GGUF file
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from tiny_checkpoints import CASES, config_of, tensors_of, tokens_of, write_folder

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
    if arguments.gguf:
        smollm2(arguments.gguf)


if __name__ == "__main__":
    main()
