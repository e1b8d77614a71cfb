"""What a decode cycle costs beside the bare passes it is made of, and what an acceptance length is worth on this machine.

    python tests/benchmarks/cycle_cost.py --json cycle_cost.json        (about eight minutes on two cores)

Everything runs in one process, in turns, compilation apart; times are medians. A cycle's time is that of a whole call less a
call that ends with its first token, divided by the cycles it made. Bare passes are timed in a loop on the device, on a cache of
the same size. The what-if part decodes with a draft that proposes the plain text with a given chance per token, at the real cost
of a head's passes: speed-up against acceptance length, with the acceptance length at which a chain breaks even.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

import eagle3_jax as e3
from eagle3_jax.commands import use_compilation_cache
from eagle3_jax.decoding.decode import run
from eagle3_jax.decoding.generate import prepare, read
from eagle3_jax.target import Target
from eagle3_jax.tokenizer import chat_ids
from eagle3_jax.tree_names import parse_tree
from eagle3_jax.tuning.costs import expand_passes, extend_passes, target_passes

QUESTION = "Explain in a few paragraphs how a mechanical clock keeps time."
PASSES = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="smollm2-135m")
    parser.add_argument("--draft-weights", choices=("float", "int8"), default="int8", help="int8: as the commands read a head on a CPU")
    parser.add_argument("--trees", nargs="+", default=["chain:3", "tree:16,4,4", "tree:8,3,3", "tree:60,8,10"])
    parser.add_argument("--what-if", nargs="*", default=["chain:1", "chain:2", "chain:3"], help="chains for the what-if part")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slots", type=int, default=256, help="of the caches that bare passes read, half of them full")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    use_compilation_cache()
    target = e3.load_target(args.target)
    draft = e3.load_draft(args.draft, target, weights=args.draft_weights)
    prompt = chat_ids(e3.load_tokenizer(args.target), [{"role": "user", "content": QUESTION}])
    calls = Calls(target, prompt, args.tokens)
    plain_call = calls.make(None, None)
    plain_text = read(plain_call()).tokens[0]
    result: dict[str, Any] = {"tokens": args.tokens, "prompt_tokens": len(prompt), "trees": {}, "what_if": []}

    shapes = {name: parse_tree(name) for name in args.trees}
    whole = {name: calls.make(draft, shape) for name, shape in shapes.items()} | {"plain": plain_call}
    first = {name: calls.make(draft, shape, 1) for name, shape in shapes.items()} | {"plain": calls.make(None, None, 1)}
    bare: dict[str, Callable[[], Any]] = {"target x1": partial(target_passes(target, 1, 1, draft.taps, args.slots), PASSES)}
    plans: dict[str, list[str]] = {"plain": ["target x1"]}
    for name, shape in shapes.items():
        assert isinstance(shape, (e3.Chain, e3.Tree))
        tree = shape.tree
        passes = {
            f"target x{tree.nodes}": target_passes(target, tree.nodes, 1, draft.taps, args.slots),
            f"extend x{tree.depth + 1}": extend_passes(target, draft, tree.depth + 1, 1, args.slots),
            f"expand x{tree.width}": expand_passes(target, draft, tree.width, 1, args.slots),
        }
        for key, call in passes.items():
            bare.setdefault(key, partial(call, PASSES))
        plans[name] = [*list(passes)[:2], *[f"expand x{tree.width}"] * (tree.depth - 1)]

    everything = {f"whole {k}": v for k, v in whole.items()} | {f"first {k}": v for k, v in first.items()} | bare
    seconds = in_turns(everything, args.repeats)
    for name in plans:
        cycles = len(read(whole[name]()).accept_lengths[0])
        cycle = (seconds[f"whole {name}"] - seconds[f"first {name}"]) / cycles * 1e3
        parts = sum(seconds[part] for part in plans[name]) / PASSES * 1e3
        result["trees"][name] = {
            "cycle_ms": cycle,
            "bare_ms": parts,
            "ratio": cycle / parts,
            "cycles": cycles,
            "tau": (args.tokens - 1) / cycles,
        }
        print(f"{name:14s} cycle {cycle:7.2f} ms, bare passes {parts:7.2f} ms, ratio {cycle / parts:.3f}", flush=True)
    result["bare_ms"] = {name: seconds[name] / PASSES * 1e3 for name in bare}
    print("one pass: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in result["bare_ms"].items()), flush=True)

    step = result["trees"]["plain"]["cycle_ms"]
    for name in args.what_if:
        for chance in (0.0, 0.5, 0.7, 0.85, 1.0):
            scripted = e3.ScriptedDraft.of(draft, [prompt + plain_text], chance, seed=1)
            call, start = calls.make(scripted, parse_tree(name)), calls.make(scripted, parse_tree(name), 1)
            times = in_turns({"call": call, "first": start, "plain": plain_call, "plain first": first["plain"]}, 1)
            output = read(call())
            assert output.tokens[0] == plain_text
            gain = (times["plain"] - times["plain first"]) / (times["call"] - times["first"])
            result["what_if"].append({"tree": name, "chance": chance, "tau": output.tau, "speed_up": gain})
            print(f"what if {name} chance {chance:.2f}: acceptance length {output.tau:.2f}, speed-up {gain:.2f}", flush=True)
        mine = [w for w in result["what_if"] if w["tree"] == name]
        # A cycle's cost does not depend on what it accepts, so speed-up is proportional to the acceptance length.
        slope = statistics.median(w["speed_up"] / w["tau"] for w in mine)
        result["trees"].setdefault(name, {})["break_even"] = 1 / slope
        print(
            f"{name}: a cycle costs {1 / slope:.2f} plain steps, the acceptance length at which it breaks even (step {step:.1f} ms)",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


class Calls:
    """Decode calls of one prompt; the first, uncounted round of `in_turns` compiles them."""

    def __init__(self, target: Target, prompt: list[int], tokens: int):
        self.target, self.prompt, self.tokens = target, prompt, tokens

    def make(self, draft: Any, tree: Any, limit: int | None = None) -> Callable[[], Any]:
        """A function that runs the compiled program; `limit` tokens within the same program."""
        request, config = prepare(self.target, draft, [self.prompt], self.tokens, tree=tree, eos_token_ids=[])
        if limit is not None:
            request, _ = prepare(self.target, draft, [self.prompt], limit, tree=tree, eos_token_ids=[])
        return lambda: jax.block_until_ready(run(self.target, draft, request, config))


def in_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of every call, one uncounted round first."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if i:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
