"""Answers per second over a set of prompts: this project's `Server` against Hugging Face's batched `generate`.

    python tests/benchmarks/regeneration.py compare MODEL.gguf prompts.jsonl --torch-python .../python --out regeneration.json

runs both in turns, each in a process of its own, `--rounds` times: the same prompts (a file with `turns`), the same chat template,
batch, temperature and limit of tokens, float32. Hugging Face gets the prompts sorted by length, so that little is padded, and each
number of threads of `--threads` in every round; its better one counts. A token counts up to and including its answer's stop token;
loading, compiling and one uncounted batch come before the clock. `ours` and `huggingface` run one side alone, as JSON.

Ours needs the project, the other side torch, transformers, accelerate and gguf; the two may be different environments.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def questions(args: argparse.Namespace) -> list[str]:
    """The first question of every n-th record, `count` of them."""
    records = [json.loads(line) for line in Path(args.prompts).read_text(encoding="utf-8").splitlines() if line.strip()]
    return [records[i * len(records) // args.count]["turns"][0] for i in range(args.count)]


def ours(args: argparse.Namespace) -> dict[str, Any]:
    from eagle3_jax.commands import use_compilation_cache
    from eagle3_jax.decoding.serve import Job, Server
    from eagle3_jax.tokenizer import chat_ids, load_tokenizer
    from eagle3_jax.tree_names import parse_tree
    from eagle3_jax.weights import load_draft, load_target

    use_compilation_cache()
    tokenizer, target = load_tokenizer(args.model), load_target(args.model)
    draft = load_draft(args.draft, target) if args.draft else None
    prompts = [chat_ids(tokenizer, [{"role": "user", "content": text}]) for text in questions(args)]
    server = Server(
        target,
        draft,
        batch=args.batch,
        max_new_tokens=args.new_tokens,
        temperature=args.temperature,
        tree=parse_tree(args.tree),
    )

    def run(jobs: list[Job]) -> tuple[int, float, float]:
        """Tokens, seconds, and the mean share of rows at work."""
        start, tokens = time.perf_counter(), 0
        for job in jobs:
            server.submit(job)
        busy = []
        for answers in server.run():
            busy.append(server.running / args.batch)
            tokens += sum(len(answer.tokens) for answer in answers)
        return tokens, time.perf_counter() - start, statistics.mean(busy)

    jobs = [Job(i, ids, seed=i) for i, ids in enumerate(prompts)]
    # Every shape of the counted run: the caches have grown to their last size when it begins.
    run([Job("longest", max(prompts, key=len)), *jobs[:2]])
    tokens, seconds, busy = run(jobs)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "acceptance_length": server.tau,
        "rows_at_work": busy,
    }


def huggingface(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(args.threads[0])
    file = Path(args.model)
    where, options = (str(file.parent), {"gguf_file": file.name}) if file.suffix == ".gguf" else (str(file), {})
    tokenizer = AutoTokenizer.from_pretrained(where, padding_side="left", **options)
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options).eval()
    stop = tokenizer.eos_token_id
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True)["input_ids"]
        for text in questions(args)
    ]
    prompts.sort(key=len)
    sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0} if args.temperature else {"do_sample": False}

    def run(batch: list[list[int]], new_tokens: int) -> int:
        padded = tokenizer.pad({"input_ids": batch}, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**padded, max_new_tokens=new_tokens, eos_token_id=stop, pad_token_id=stop, **sampling)
        rows = out[:, padded["input_ids"].shape[1] :].tolist()
        return sum(row.index(stop) + 1 if stop in row else len(row) for row in rows)

    torch.manual_seed(0)
    run(prompts[: args.batch], 4)
    start = time.perf_counter()
    tokens = sum(run(prompts[i : i + args.batch], args.new_tokens) for i in range(0, len(prompts), args.batch))
    seconds = time.perf_counter() - start
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "threads": args.threads[0],
        "torch": torch.__version__,
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    common = [args.model, args.prompts, "--count", args.count, "--batch", args.batch, "--new-tokens", args.new_tokens]
    common += ["--temperature", args.temperature, "--tree", args.tree, *(["--draft", args.draft] if args.draft else [])]
    sides = {f"huggingface, {n} threads": [args.torch_python, __file__, "huggingface", *common, "--threads", n] for n in args.threads}
    sides["ours"] = [sys.executable, __file__, "ours", *common]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(args.rounds):
        for side, command in sides.items():
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{side} failed:\n{done.stderr}")
            runs[side].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{side}: {runs[side][-1]['tokens_per_second']:.1f} tokens/s", file=sys.stderr, flush=True)
    medians = {side: statistics.median(run["tokens_per_second"] for run in of_side) for side, of_side in runs.items()}
    best = max((side for side in medians if side != "ours"), key=medians.__getitem__)
    ratios = [mine["tokens_per_second"] / theirs["tokens_per_second"] for mine, theirs in zip(runs["ours"], runs[best], strict=True)]
    settings = {key: getattr(args, key) for key in ("count", "batch", "new_tokens", "temperature", "draft", "tree")}
    return {"settings": settings, "median_tokens_per_second": medians, "against": best, "ratio_of_each_round": ratios, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("compare", "ours", "huggingface"))
    parser.add_argument("model", help="a .gguf file or a Hugging Face folder")
    parser.add_argument("prompts", help="JSONL whose records have `turns`")
    parser.add_argument("--count", type=int, default=96, help="prompts, spread evenly over the file")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=320)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="torch's thread counts")
    parser.add_argument("--draft", help="our side's head; unset: plain decoding")
    parser.add_argument("--tree", default="auto", help="what it drafts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter of an environment with torch")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    result = {"compare": compare, "ours": ours, "huggingface": huggingface}[args.side](args)
    text = json.dumps(result, indent=1 if args.side == "compare" else None)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
