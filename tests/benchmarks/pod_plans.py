"""The README's table of pods: one `eagle3-train --plan` or `eagle3-bench --plan` after the other, each in a process of its own.

    python tests/benchmarks/pod_plans.py --libtpu FOLDER --out plans.md

Programs that plans.md holds already are not compiled again, so that an interrupted run goes on. `--only TEXT`: programs whose name
has it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP = "--online --draft-vocab 32000 --row-tokens 2048 --row-slots 2048"
CYCLE = "--context 8192 --draft-vocab 32000"
TRAINING = {
    "8B step, v5e:4x4": f"v5e:4x4 --target llama-3.1-8b {STEP}",
    "8B step, v6e:8x8": f"v6e:8x8 --target llama-3.1-8b {STEP}",
    "8B step, v5p:4x4x4": f"v5p:4x4x4 --target llama-3.1-8b {STEP}",
    "8B step, tpu7x:4x4x4": f"tpu7x:4x4x4 --target llama-3.1-8b {STEP}",
    "8B step, v5e:16x16": f"v5e:16x16 --target llama-3.1-8b {STEP}",
    "70B step, v5p:4x4x4": f"v5p:4x4x4 --target llama-3.3-70b {STEP}",
}
DECODING = {
    **{
        f"8B cycle, {pod}, batch {batch}": f"{pod} --target llama-3.1-8b --trees chain:3 tree:60,8,10 --batch {batch} {CYCLE}"
        for pod in ("v5e:2x4", "v6e:2x4")
        for batch in (1, 8, 64)
    },
    "70B cycle, v5p:2x2x2, batch 8": f"v5p:2x2x2 --target llama-3.3-70b --trees tree:60,8,10 --batch 8 {CYCLE}",
    "70B cycle, v6e:2x4, batch 8": f"v6e:2x4 --target llama-3.3-70b --trees tree:60,8,10 --batch 8 {CYCLE}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libtpu", required=True, help="folder that pip install --target FOLDER libtpu filled")
    parser.add_argument("--out", type=Path, default=Path("plans.md"))
    parser.add_argument("--only", default="", help="part of the names")
    args = parser.parse_args()
    done = args.out.read_text() if args.out.exists() else ""
    for script, programs in (("train/train.py", TRAINING), ("infer/bench.py", DECODING)):
        for name, options in programs.items():
            if args.only not in name or f"| {name} |" in done:
                continue
            command = [sys.executable, str(ROOT / script), "--plan", *options.split(), "--libtpu", args.libtpu]
            begun = time.perf_counter()
            ran = subprocess.run(command, capture_output=True, text=True)
            rows = [line for line in ran.stdout.splitlines() if line.startswith("| ") and not line.startswith("| program")]
            if ran.returncode or not rows:
                print(f"{name}: {ran.stderr.strip().splitlines()[-1:]}", file=sys.stderr, flush=True)
                continue
            with args.out.open("a") as out:
                out.writelines(f"| {name} {line}\n" for line in rows)
            print(f"{name}: {time.perf_counter() - begun:.0f} s", *rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
