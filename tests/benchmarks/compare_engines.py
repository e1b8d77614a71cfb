"""What a user would run instead, on the same machine, in turns: Hugging Face, vLLM plainly and with the same head, and this project.

    python tests/benchmarks/compare_engines.py mt_bench.jsonl --target SmolLM2-135M-Instruct/ --head head/ \\
        --hf-python hf-env/bin/python --vllm-python vllm-env/bin/python --limit 8 --json compare.json

Every engine is a process of its own, in the environment that holds it, and stays loaded; prompt by prompt they take turns, in an order
that turns around every time, and while one decodes the others wait. Greedy, float32, exactly --new-tokens tokens per answer, batch 1;
each engine first answers one prompt that is not counted. An engine that is not installed is skipped and named. --target: a Hugging
Face folder (vLLM and Hugging Face read no GGUF built-in); --head: a head in the official layout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Answer = Callable[[list[int], int], list[int]]


def own(args: argparse.Namespace, tree: str | None) -> Answer:
    sys.path.insert(0, str(ROOT))
    import eagle3_jax as e3
    from eagle3_jax.commands import use_compilation_cache
    from eagle3_jax.tree_names import parse_tree

    use_compilation_cache()
    target = e3.load_target(args.target)
    draft = e3.load_draft(args.head, target, weights="int8") if tree else None  # as the commands read it on a CPU
    shape = parse_tree(tree) if tree else None
    return lambda ids, new: e3.generate(target, draft, [ids], new, tree=shape, eos_token_ids=[]).tokens[0]


def hugging_face(args: argparse.Namespace) -> Answer:
    import torch
    from transformers import AutoModelForCausalLM

    if args.threads:
        torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()

    def answer(ids: list[int], new: int) -> list[int]:
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        return out[0, len(ids) :].tolist()

    return answer


def vllm(args: argparse.Namespace, drafts: int | None) -> Answer:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="2", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    speculative = None
    if drafts is not None:
        speculative = {"method": "eagle3", "model": str(Path(args.head).absolute()), "num_speculative_tokens": drafts}
    # Every prompt is asked twice, and no other engine remembers it.
    options = {"dtype": "float32", "max_model_len": 2048, "enable_prefix_caching": False}
    model = LLM(model=args.target, speculative_config=speculative, **options)

    def answer(ids: list[int], new: int) -> list[int]:
        settings = SamplingParams(temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        return list(model.generate({"prompt_token_ids": ids}, settings, use_tqdm=False)[0].outputs[0].token_ids)

    return answer


def engines(args: argparse.Namespace) -> dict[str, tuple[str, Callable[[], Answer]]]:
    """Name -> (python, how to load it there)."""
    found: dict[str, tuple[str, Callable[[], Answer]]] = {"eagle3-jax plain": (sys.executable, lambda: own(args, None))}
    for tree in args.trees if args.head else ():
        found[f"eagle3-jax {tree}"] = (sys.executable, lambda tree=tree: own(args, tree))
    found["transformers"] = (args.hf_python, lambda: hugging_face(args))
    found["vllm plain"] = (args.vllm_python, lambda: vllm(args, None))
    for drafts in args.vllm_drafts if args.head else ():
        found[f"vllm eagle3 {drafts}"] = (args.vllm_python, lambda drafts=drafts: vllm(args, drafts))
    return found


class Engine:
    """A loaded engine in another process: a line of JSON asks, a line answers."""

    def __init__(self, name: str, python: str, argv: list[str]):
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # a pipe that nobody reads would fill up and stop the engine
        self._process = subprocess.Popen(
            [python, __file__, *argv, "--worker", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.problem = self._read().get("problem")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        self._log.seek(0)
        return {"problem": " ".join(self._log.read().strip().splitlines()[-1:]) or "it ended without a word"}

    def ask(self, ids: list[int], new: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": ids, "new": new}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if "problem" in answer:
            raise SystemExit(f"{self.name} broke: {answer['problem']}")
        return answer

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:  # an engine that will not go must not cost the figures
            self._process.kill()
        self._log.close()


MARK = "\x1eanswer "
"""In front of the lines that count: engines print what they like on the same stream."""


def work(answer: Answer) -> None:
    print(MARK + "{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        tokens = answer(request["ids"], request["new"])
        print(MARK + json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="a file of prompts, as eagle3-bench reads them")
    parser.add_argument("--target", required=True, help="Hugging Face folder")
    parser.add_argument("--head", help="folder of a head in the official layout; unset: plain decoding only")
    parser.add_argument("--hf-python", default=sys.executable, help="python of an environment with transformers and torch")
    parser.add_argument("--vllm-python", default=sys.executable, help="python of an environment with vllm-cpu")
    parser.add_argument("--trees", nargs="*", default=["chain:2", "chain:3", "tree:8,3,3"], help="this project's drafts")
    parser.add_argument("--vllm-drafts", type=int, nargs="*", default=[2, 3], help="num_speculative_tokens")
    parser.add_argument("--threads", type=int, help="torch threads for transformers; unset: its own choice")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--only", nargs="*", help="engines by name; unset: all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    known = engines(args)
    if args.worker:
        try:
            answer = known[args.worker][1]()
        except Exception as error:  # whatever an engine lacks, it is skipped and its reason shown
            print(MARK + json.dumps({"problem": f"{type(error).__name__}: {error}"}), flush=True)
            return
        work(answer)
        return

    sys.path.insert(0, str(ROOT))
    from eagle3_jax.bench.prompt_sets import read_sets
    from eagle3_jax.prompts import encode_prompt
    from eagle3_jax.terminal import table
    from eagle3_jax.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.target)
    (prompts,) = read_sets([args.prompts], args.limit).values()
    rows = [encode_prompt(prompt, tokenizer) for prompt in prompts]
    argv = [part for part in sys.argv[1:] if part != "--worker"]
    running: list[Engine] = []
    skipped: dict[str, Any] = {}
    for name, (python, _) in known.items():
        if args.only and name not in args.only:
            continue
        engine = Engine(name, python, argv)
        if engine.problem:
            skipped[name] = engine.problem
            print(f"skipped {name}: {engine.problem}", flush=True)
            engine.close()
        else:
            running.append(engine)
    times: dict[str, list[float]] = {engine.name: [] for engine in running}
    texts: dict[str, list[list[int]]] = {engine.name: [] for engine in running}
    try:
        for engine in running:
            for row in rows:  # compiles every shape it will meet, or warms up
                engine.ask(row, args.new_tokens)
        for turn, row in enumerate(rows):
            for engine in running if turn % 2 == 0 else reversed(running):
                answer = engine.ask(row, args.new_tokens)
                times[engine.name].append(answer["seconds"])
                texts[engine.name].append(answer["tokens"])
    finally:
        for engine in running:
            engine.close()
    if not running:
        raise SystemExit("no engine could be loaded")
    rates = {name: args.new_tokens * len(found) / sum(found) for name, found in times.items()}
    first = running[0].name
    lines = [["", "tokens/s", f"against {first}", "median seconds", f"same text as {first}"]]
    for name, found in times.items():
        same = sum(a == b for a, b in zip(texts[name], texts[first], strict=True))
        gain = f"{rates[name] / rates[first]:.2f}x"
        lines.append([name, f"{rates[name]:.1f}", gain, f"{statistics.median(found):.2f}", f"{same}/{len(rows)}"])
    print(table(lines))
    if args.json:
        record = {"new_tokens": args.new_tokens, "prompts": len(rows), "tokens_per_second": rates, "seconds": times, "skipped": skipped}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
