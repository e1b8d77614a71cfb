"""Tokens per second of Hugging Face's cached greedy `generate`, the number a user has today.

Needs torch, transformers, accelerate and gguf.

    python tests/benchmarks/hf_baseline.py SmolLM2-135M-Instruct.Q4_1.gguf

Loads the model in float32 and answers one question with each number of torch threads in turn: one uncounted round first, then
`--repeats` rounds. Prints JSON: every run, the median per thread count, and the better count's.
"tokens_per_second" runs the clock over the whole call; "decode_tokens_per_second" leaves out the time to the first token,
which is measured by a call of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = "Explain in a few paragraphs how a mechanical clock keeps time."


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Tokens per second of Hugging Face's cached greedy generate.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a .gguf file or a Hugging Face folder")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate; stop tokens are ignored")
    parser.add_argument("--repeats", type=int, default=3, help="counted runs per thread count")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch thread counts to try")
    parser.add_argument("--prompt", default=QUESTION, help="the user's message; the model's chat template is applied")
    arguments = parser.parse_args()

    file = arguments.model
    where = (str(file.parent), {"gguf_file": file.name}) if file.suffix == ".gguf" else (str(file), {})
    tokenizer = AutoTokenizer.from_pretrained(where[0], **where[1])
    model = AutoModelForCausalLM.from_pretrained(where[0], dtype=torch.float32, **where[1]).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": arguments.prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )

    def seconds(new_tokens: int) -> float:
        """Wall time of one generate call that makes exactly `new_tokens` tokens."""
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                **prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, use_cache=True, pad_token_id=0
            )
        took = time.perf_counter() - start
        made = out.shape[1] - prompt["input_ids"].shape[1]
        if made != new_tokens:
            raise SystemExit(f"generate made {made} tokens instead of {new_tokens}")
        return took

    runs: dict[int, list[dict[str, float]]] = {threads: [] for threads in arguments.threads}
    for repeat in range(arguments.repeats + 1):
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            first, whole = seconds(1), seconds(arguments.new_tokens)
            if repeat:
                decode = (arguments.new_tokens - 1) / (whole - first)
                runs[threads].append(
                    {"tokens_per_second": arguments.new_tokens / whole, "decode_tokens_per_second": decode, "prompt_seconds": first}
                )
    medians = {threads: {key: statistics.median(run[key] for run in found) for key in found[0]} for threads, found in runs.items()}
    best = max(medians, key=lambda threads: medians[threads]["decode_tokens_per_second"])
    report = {
        "model": file.name,
        "dtype": "float32",
        "prompt_tokens": prompt["input_ids"].shape[1],
        "new_tokens": arguments.new_tokens,
        "best_threads": best,
        **medians[best],
        "median_by_threads": medians,
        "runs_by_threads": runs,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
