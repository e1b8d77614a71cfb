"""Run by `test_vllm.py` in an environment that has vLLM for the CPU: TARGET HEAD WORK.json.

WORK.json holds `chats` (lists of messages), `new_tokens` and `drafts`. Each chat is answered greedily and alone, with the head as EAGLE-3.
Added to the file: prompt ids, answer ids and texts by chat; vLLM's own counters of speculation; and what the head drafted, cycle by cycle.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(target: str, head: str, work: str) -> None:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    given = json.loads(Path(work).read_text())
    model = LLM(
        model=target,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={"method": "eagle3", "model": head, "num_speculative_tokens": given["drafts"]},
    )
    drafted: list[list[int]] = []
    propose = SpecDecodeBaseProposer.propose

    def watched(self, *args, **kwargs):
        found = propose(self, *args, **kwargs)
        drafted.append(found[0].tolist())
        return found

    SpecDecodeBaseProposer.propose = watched
    settings = SamplingParams(temperature=0.0, max_tokens=given["new_tokens"])
    prompts, tokens, texts, drafts = [], [], [], []
    for chat in given["chats"]:
        drafted.clear()
        answer = model.chat(chat, settings, use_tqdm=False)[0]
        prompts.append(list(answer.prompt_token_ids))
        tokens.append(list(answer.outputs[0].token_ids))
        texts.append(answer.outputs[0].text)
        drafts.append(list(drafted))
    counters = {}
    for metric in model.get_metrics():
        if metric.name.startswith("vllm:spec_decode_"):
            counters[metric.name.removeprefix("vllm:spec_decode_")] = getattr(metric, "values", None) or metric.value
    found = {"prompts": prompts, "tokens": tokens, "texts": texts, "drafted": drafts, "counters": counters}
    Path(work).write_text(json.dumps(given | found))


if __name__ == "__main__":
    main(*sys.argv[1:])
