"""Tokens per second of a training step, SmolLM2-135M's widths, J 7: this project's, online and offline, and a plain PyTorch one.

    python tests/benchmarks/train_step.py jax                   # in this project's environment
    python tests/benchmarks/train_step.py torch                 # in one with torch and transformers; each thread count is tried
    python tests/benchmarks/train_step.py encode --data conversations.jsonl.gz --texts texts.npz       # real text for both:
    python tests/benchmarks/train_step.py jax --texts texts.npz --rows 1 --tokens 1024 --slots 768
    python tests/benchmarks/train_step.py torch --texts texts.npz --conversations 1 2 3

Random weights: only the shapes matter. Both steps are online: the target's pass, seven unrolled steps of the head, the loss against the
target's distribution, backward, clip, AdamW. The PyTorch step is written as one writes it first: Hugging Face's model, one mask [T, s T],
full logits, autograd.

Without texts, tokens are random and every slot is scored. With texts, both take the same conversations, in random order, and what counts
is their tokens, padding not: ours in packed rows, only scored slots unrolled, as many tokens a step as its rows hold on average over an
epoch; PyTorch's one conversation per row, padded to the longest of its batch, as the official code has it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

V, D, F, L, N, K, H, U = 49152, 576, 1536, 30, 9, 3, 64, 8192
LONGEST = 512
"""Conversations are cut at so many tokens."""


def best_of(step: Callable[[], Any], tries: int) -> float:
    """Seconds of the median step, the first apart."""
    step()
    seconds = []
    for _ in range(tries):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def encode(args: argparse.Namespace) -> None:
    """Conversations as ids, for an environment without tokenizers too."""
    import numpy as np

    from eagle3_jax.data import Report, encode_all, read_records
    from eagle3_jax.tokenizer import load_tokenizer
    from eagle3_jax.training.features import select

    records = itertools.islice(read_records(args.data), args.limit)
    chosen = select(encode_all(load_tokenizer("smollm2-135m"), records, Report(), max_length=LONGEST), LONGEST)
    print(chosen.report())
    examples = [chosen.examples[i] for i in np.random.default_rng(0).permutation(len(chosen.examples))]
    ids, response = (np.concatenate(parts) for parts in zip(*examples, strict=True))
    np.savez(args.texts, ids=ids, response=response, offsets=np.cumsum([0, *(len(part) for part, _ in examples)]))


def read_texts(path: str) -> list[tuple[Any, Any]]:
    """(ids, response), int32 [n] each, of every conversation."""
    import numpy as np

    with np.load(path) as texts:
        ids, response, offsets = texts["ids"], texts["response"], texts["offsets"]
    return [(ids[a:b], response[a:b]) for a, b in itertools.pairwise(offsets)]


def run_jax(args: argparse.Namespace) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from eagle3_jax.config import DraftConfig, TargetConfig
    from eagle3_jax.params import initialize
    from eagle3_jax.target import Target
    from eagle3_jax.training.batches import BatchSource, Cursor, TokenExamples
    from eagle3_jax.training.features import Selection
    from eagle3_jax.training.flops import measured_peak, step_flops
    from eagle3_jax.training.train import fresh_draft, frozen_tables
    from eagle3_jax.training.trainer import Fixed, TrainConfig, complete, new_state, split, train_step
    from eagle3_jax.training.ttt import Batch, recipe

    sizes = TargetConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        num_layers=L,
        num_heads=N,
        num_kv_heads=K,
        head_dim=H,
        max_position=8192,
        tie_embeddings=True,
    )
    target = initialize(Target(sizes), jax.random.key(0), args.compute)
    kept = np.arange(U, dtype=np.int32)
    draft_config = DraftConfig.for_target(sizes, U)
    rule = recipe("aligned", steps=7)
    T, B = args.tokens, args.rows
    peak = measured_peak(args.compute, 2048, 5)
    print(f"measured peak of a {args.compute} product: {peak / 1e9:.0f} GFLOP/s")

    def stepper(online: bool, slots: int) -> tuple[TrainConfig, Fixed, Callable[[Any], None]]:
        config = TrainConfig(recipe=rule, rows=B, row_tokens=T, row_slots=slots, online=online, compute=args.compute)
        params, variables = split(fresh_draft(draft_config, kept, 0), rule)
        fixed = Fixed(frozen_tables(target, kept), variables, target if online else None)
        held: list[Any] = [new_state(params, config)]

        def step(batch: Any) -> None:
            held[0], metrics = train_step(draft_config, config, held[0], fixed, jax.tree.map(lambda x: x[None], batch))
            jax.block_until_ready((held[0], metrics))

        return config, fixed, step

    def say(name: str, seconds: float, tokens: float, config: TrainConfig) -> None:
        flops = step_flops(draft_config, config, sizes if config.online else None).total
        share = f"{flops / seconds / 1e9:.0f} GFLOP/s, {flops / seconds / peak:.0%} of the peak"
        print(f"jax, {name}: {seconds:.2f} s, {tokens / seconds:.0f} tokens/s, {share}", flush=True)

    if args.texts:
        texts = Selection(read_texts(args.texts), 0, 0)
        source = BatchSource(lambda: TokenExamples(texts), rule, seed=0, rows=B, width=T, slots=args.slots or T)
        ahead = source.plan(Cursor(epoch=1))
        planned = [rows for rows, _ in itertools.takewhile(lambda batch: batch[1].epoch == 1, ahead)]
        batches = itertools.cycle([source.build(rows) for rows in planned[: args.tries]])
        config, _, step = stepper(True, args.slots or T)
        seconds = best_of(lambda: step(next(batches)), args.tries)
        tokens = sum(map(source.tokens, planned)) / len(planned)
        print(f"{tokens:.0f} tokens of conversations in {B} x {T}; {source.left_out} conversations left out")
        say(f"texts, {config.row_slots} slots a row", seconds, tokens, config)
        return

    row = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    batch = Batch(
        tokens=np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32),
        positions=row,
        features=None,
        hidden=None,
        argmax=None,
        response=np.ones((B, T), np.int32),
        segments=np.ones((B, T), np.int32),
        valid=np.ones((B, T), bool),
        slots=row,
    )  # type: ignore[arg-type]
    for online in (True, False):
        config, fixed, step = stepper(online, T)
        filled = batch
        if not online:
            inside = Fixed(fixed.frozen, fixed.variables, target)
            filled = jax.tree.map(np.asarray, jax.jit(complete, static_argnums=0)(draft_config, inside, batch))
            filled = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x, filled)
        say("online" if online else "offline", best_of(lambda step=step, filled=filled: step(filled), args.tries), B * T, config)


def run_torch(args: argparse.Namespace) -> None:
    import torch
    import torch.nn.functional as f
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv

    J = 7
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=L,
        num_attention_heads=N,
        num_key_value_heads=K,
        head_dim=H,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval().requires_grad_(False)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dense = lambda a, b: nn.Linear(a, b, bias=False)  # noqa: E731
            self.fc, self.input_norm, self.hidden_norm = dense(3 * D, D), LlamaRMSNorm(D), LlamaRMSNorm(D)
            self.q, self.k, self.v, self.o = dense(2 * D, N * H), dense(2 * D, K * H), dense(2 * D, K * H), dense(N * H, D)
            self.mlp_norm, self.norm = LlamaRMSNorm(D), LlamaRMSNorm(D)
            self.gate, self.up, self.down, self.head = dense(D, F), dense(D, F), dense(F, D), dense(D, U)
            self.rotary = LlamaRotaryEmbedding(config)

        def forward(self, features: Any, tokens: Any, teacher: Any, counts: Any) -> Any:
            B, T = tokens.shape
            x, keys, values, total = self.fc(features), [], [], 0.0
            causal = torch.full((T, T), float("-inf")).triu(1)
            diagonal = torch.full((T, T), float("-inf")).fill_diagonal_(0.0)
            for s in range(J):
                embedded = target.model.embed_tokens(torch.roll(tokens, -1 - s, 1))
                u = torch.cat([self.input_norm(embedded), self.hidden_norm(x)], -1)
                q, k, v = (p(u).view(B, T, -1, H).transpose(1, 2) for p in (self.q, self.k, self.v))
                cos, sin = self.rotary(u, torch.arange(s, T + s)[None])
                q, k = apply_rotary_pos_emb(q, k, cos, sin)
                keys.append(repeat_kv(k, N // K))
                values.append(repeat_kv(v, N // K))
                mask = torch.cat([causal, *[diagonal] * s], -1)
                attended = f.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask)
                x = x + self.o(attended.transpose(1, 2).reshape(B, T, -1))
                u = self.mlp_norm(x)
                x = x + self.down(f.silu(self.gate(u)) * self.up(u))
                logits = self.head(self.norm(x)).float()
                p = torch.roll(teacher, -1 - s, 1)
                loss = -(p * f.log_softmax(logits, -1)).sum(-1) * torch.roll(counts, -1 - s, 1)
                total = total + 0.8**s * loss.mean()
            return total

    def stepper() -> Callable[..., None]:
        head = Head()
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)

        def step(tokens: Any, response: Any = 1.0, mask: Any = None) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=args.compute == "bfloat16"):
                update(tokens, response, mask)

        def update(tokens: Any, response: Any, mask: Any) -> None:
            with torch.no_grad():
                out = target(tokens, attention_mask=mask, output_hidden_states=True)
                features = torch.cat([out.hidden_states[i] for i in (2, L // 2, L - 3)], -1)
                counts = (out.logits.argmax(-1) < U).float() * response
                teacher = out.logits[..., :U].float().softmax(-1)
            optimizer.zero_grad()
            head(features, tokens, teacher, counts).backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()

        return step

    def padded(texts: list[tuple[Any, Any]]) -> tuple[Any, Any, Any]:
        """Tokens, response mask and attention mask [rows, the longest]."""
        ids, response = ([torch.tensor(part) for part in parts] for parts in zip(*texts, strict=True))
        pad = lambda parts: nn.utils.rnn.pad_sequence(parts, batch_first=True)  # noqa: E731
        return pad(ids).long(), (pad(response) > 0).float(), pad([torch.ones_like(part) for part in ids])

    for threads in args.threads:
        torch.set_num_threads(threads)
        step = stepper()
        if not args.texts:
            tokens = torch.randint(0, V, (args.rows, args.tokens))
            seconds = best_of(lambda step=step, tokens=tokens: step(tokens), args.tries)
            print(f"torch, online, {args.compute}, {threads} threads: {seconds:.2f} s, {tokens.numel() / seconds:.0f} tokens/s", flush=True)
            continue
        texts = read_texts(args.texts)
        for count in args.conversations:
            parts = [texts[i : i + count] for i in range(0, args.first - args.first % count, count)]
            batches = [padded(part) for part in parts]
            step(*batches[0])
            begun = time.perf_counter()
            for batch in batches:
                step(*batch)
            seconds = time.perf_counter() - begun
            real, room = sum(len(ids) for part in parts for ids, _ in part), sum(batch[0].numel() for batch in batches)
            print(
                f"torch, texts, {count} conversations a batch, {threads} threads: {seconds / len(batches):.2f} s a step, "
                f"{real / seconds:.0f} tokens/s ({real / room:.0%} of its rows are tokens)",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("jax", "torch", "encode"))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--compute", choices=("float32", "bfloat16"), default="float32", help="bfloat16: PyTorch's by autocast")
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--data", help="conversations to encode, as eagle3-data reads them")
    parser.add_argument("--limit", type=int, default=1000, help="conversations to encode")
    parser.add_argument("--texts", help="encoded conversations, an .npz file")
    parser.add_argument("--slots", type=int, help="scored slots of a row of ours (default: all)")
    parser.add_argument("--first", type=int, default=24, help="so many conversations go through the PyTorch step")
    parser.add_argument("--conversations", type=int, nargs="+", default=[2, 3, 4], help="conversations in a batch of the PyTorch step")
    args = parser.parse_args()
    {"jax": run_jax, "torch": run_torch, "encode": encode}[args.what](args)


if __name__ == "__main__":
    main()
