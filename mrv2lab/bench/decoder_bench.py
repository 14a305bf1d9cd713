"""What the decoder costs on a GPU: the 28-layer stack in one graph, its kernels, and what else they could be.

    python -m mrv2lab.bench.decoder_bench --out decoder.json [--parts stack,agreement,memory,matvec,products]
        [--tokens 64,128,256] [--quick]

Qwen3-0.6B's shape, bfloat16, random weights. ``products``, ``matvec``: the products by other tiles (product_sweep.py);
the fastest become the variant ``measured``; ``--quick`` tries few, at 64 to 256 tokens. ``stack``: microseconds of a
whole forward, with and without attention and logits, by variant. ``agreement``: the variants' hidden states against the
library's; another order of a product's sums moves 28 layers of random weights by as much as bfloat16 itself does, 0.06
of a row's largest number. ``memory``: the kernels between the products beside a copy.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mrv2lab.attention import AttentionBackend, make_backend
from mrv2lab.bench import product_sweep
from mrv2lab.bench.product_sweep import time_graph
from mrv2lab.bench.result import write_result
from mrv2lab.config import QWEN3_0_6B, RunnerConfig
from mrv2lab.model.decoder import Decoder
from mrv2lab.model.products import QWEN3_0_6B_H200, Plan, Products
from mrv2lab.model.weights_random import random_weights
from mrv2lab.ops._pdl import without_early_start
from mrv2lab.ops.add_rms_norm import add_rms_norm
from mrv2lab.ops.rms_norm import rms_norm
from mrv2lab.ops.rotary_kv_write import rotary_kv_write
from mrv2lab.ops.silu_mul import silu_mul
from mrv2lab.protocol import CommonAttentionMetadata, ForwardInputs
from mrv2lab.runtime import Runtime, make_runtime

MODEL = QWEN3_0_6B
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
CONTEXT, BLOCK_SIZE = 152, 16
PARTS = ("stack", "agreement", "memory", "matvec", "products")


def late(plans: dict[int, Plan]) -> dict[int, Plan]:
    """``plans`` whose products let the next kernel start behind their sums, not beside them."""
    return {
        tokens: Plan(*(way and way._replace(tile=(*way.tile[:5], True)) for way in plan))
        for tokens, plan in plans.items()
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "library": {"plans": {}, "few": 0},
    "late": {"plans": late(QWEN3_0_6B_H200)},
    "few to 4": {"few": 4},
    "few to 1": {"few": 1},
}
"""Name -> arguments of ``Products``."""
ONLY = {"late": (8, 16, 32, 64, 128), "few to 4": (4,), "few to 1": (2,)}
"""Token counts at which a variant differs from ``ours``, if it does not everywhere."""


class NoAttention:
    """An attention backend that does nothing: the output is what was there."""

    name = "none"
    full_graphs = True

    def __init__(self, real: AttentionBackend) -> None:
        self.builder = real.builder

    def attend(self, *args: Any) -> None:
        """Nothing."""


def batch(rt: Runtime, t: int, real: AttentionBackend) -> ForwardInputs:
    """``t`` tokens: up to 256 are decodes behind CONTEXT - 1 tokens; more are prompts of 256."""
    length = 1 if t <= 256 else 256
    requests, seq_len = t // length, CONTEXT if length == 1 else length
    blocks = -(-seq_len // BLOCK_SIZE)
    starts = torch.arange(requests + 1, dtype=torch.int32) * length
    lens = torch.full((requests,), seq_len, dtype=torch.int32)
    table = (1 + torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(0))).int()
    table = table.view(requests, blocks)
    positions = torch.arange(seq_len - length, seq_len).repeat(requests)
    owner = torch.arange(requests).repeat_interleave(length)
    slots = table[owner, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    ids = torch.randint(MODEL.vocab_size, (t,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts.cuda(),
        query_start_loc_np=starts.numpy(),
        seq_lens=lens.cuda(),
        seq_lens_np_upper_bound=lens.numpy(),
        num_reqs=requests,
        num_tokens=t,
        max_query_len=length,
        max_seq_len=seq_len,
        block_table=table.cuda(),
        slot_mapping=slots.cuda(),
    )
    metadata = real.builder(MODEL.kv_groups[0]).build(common)
    return ForwardInputs(ids.cuda(), positions.cuda(), (metadata,))


class Stack:
    """Decoders of one set of weights: every variant, with attention and without."""

    def __init__(self, variants: dict[str, dict[str, Any]], tokens: tuple[int, ...] = TOKENS) -> None:
        self.tokens = tokens
        self.rt = make_runtime(RunnerConfig(device="cuda"))
        self.real = make_backend(self.rt)
        weights = {name: tensor.cuda() for name, tensor in random_weights(MODEL).items()}
        blocks = 256 * -(-CONTEXT // BLOCK_SIZE) + 1
        shape = (blocks, BLOCK_SIZE, MODEL.num_key_value_heads, MODEL.head_dim)
        self.caches = [
            tuple((torch.randn(shape, device="cuda") * 0.5).bfloat16() for _ in "kv")
            for _ in range(MODEL.num_hidden_layers)
        ]
        self.decoders: dict[tuple[str, bool], Decoder] = {}
        for variant, arguments in variants.items():
            for attention in (True, False):
                backend: Any = self.real if attention else NoAttention(self.real)
                products = Products(self.rt.backend, MODEL, **arguments)
                prefix = f"{variant} {attention}."
                decoder = Decoder(
                    MODEL, weights, self.rt, max(tokens), max_num_logits=256, max_model_len=4096,
                    attention=backend, products=products, prefix=prefix,
                )  # fmt: skip
                decoder.bind_kv_cache(self.caches)  # type: ignore[arg-type]
                self.decoders[variant, attention] = decoder
        self.inputs = {t: batch(self.rt, t, self.real) for t in tokens}

    def counts(self, variant: str) -> list[int]:
        """Token counts at which ``variant`` is measured."""
        return [t for t in self.tokens if t in ONLY.get(variant, self.tokens)]

    def timings(self) -> list[dict[str, Any]]:
        """One row a (tokens, variant, early start or not, attention or not, logits or not)."""
        rows = []
        for t in self.tokens:
            n = t if t <= 256 else t // 256
            indices = torch.arange(n, device="cuda")
            for (variant, attention), decoder in self.decoders.items():
                if t not in self.counts(variant):
                    continue
                for early in (True, False) if decoder.products.starts_early(t) else (False,):
                    for logits in (False, True):
                        if logits and not (attention and t <= 256):
                            continue

                        def queue(t: int = t, decoder: Decoder = decoder, logits: bool = logits, n: int = n) -> None:
                            decoder.forward(self.inputs[t])
                            if logits:
                                decoder.compute_logits(indices, n)  # noqa: B023 (called in this turn)

                        with contextlib.nullcontext() if early else without_early_start():
                            found = time_graph(queue)
                        row = {"tokens": t, "variant": variant, "early_start": early, "attention": attention}
                        rows.append(row | {"logits": logits} | found)
                        show(rows[-1])
        return rows

    def hidden(self, variant: str, t: int, early: bool = True, graph: bool = False) -> torch.Tensor:
        """Final hidden states of one forward."""
        decoder = self.decoders[variant, True]
        with contextlib.nullcontext() if early else without_early_start():
            decoder.forward(self.inputs[t])
            if graph:
                torch.cuda.synchronize()
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured):
                    decoder.forward(self.inputs[t])
                captured.replay()
        torch.cuda.synchronize()
        return decoder.hidden[:t].clone()

    def agreement(self, variant: str) -> list[dict[str, Any]]:
        """Each token count: bit equality where it must hold, and the largest difference from the library's way."""
        rows = []
        for t in self.counts(variant):
            ours, library = self.hidden(variant, t), self.hidden("library", t)
            error = ((ours.float() - library.float()).abs().amax(-1) / library.float().abs().amax(-1)).max()
            rows.append(
                {
                    "variant": variant,
                    "tokens": t,
                    "off": float(error),
                    "again": torch.equal(ours, self.hidden(variant, t)),
                    "without early start": torch.equal(ours, self.hidden(variant, t, early=False)),
                    "graph": torch.equal(ours, self.hidden(variant, t, graph=True)),
                }
            )
            show(rows[-1])
        return rows


def memory_kernels() -> list[dict[str, Any]]:
    """The kernels between the products, 28 launches over as many buffers, beside a copy of as many bytes."""
    rows, h, width = [], MODEL.hidden_size, MODEL.intermediate_size
    qkv_width, d = MODEL.q_size + 2 * MODEL.kv_size, MODEL.head_dim
    norm, head_norm = (torch.randn(size, device="cuda").bfloat16() for size in (h, d))
    table = torch.rand(4096, d // 2, device="cuda")
    count = MODEL.num_hidden_layers
    for t in (1, 64, 256, 2048):

        def many(*shape: int, t: int = t) -> list[torch.Tensor]:
            return [torch.randn((t, *shape), device="cuda").bfloat16() for _ in range(count)]

        x, y, gate_up, act, qkv = many(h), many(h), many(2 * width), many(width), many(qkv_width)
        cache_shape = (t // BLOCK_SIZE + 1, BLOCK_SIZE, MODEL.num_key_value_heads, d)
        caches = [torch.zeros(cache_shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        at = torch.arange(t, device="cuda")
        eps = MODEL.rms_norm_eps
        rope = (*caches, at, at, table, table, head_norm, head_norm, eps)
        kernels: dict[str, tuple[Callable[[int], object], int]] = {
            "copy [t, H]": (lambda i: y[i].copy_(x[i]), 2 * h),  # noqa: B023 (all are called in this turn)
            "copy [t, qkv]": (lambda i: qkv[i].copy_(qkv[i - 1]), 2 * qkv_width),  # noqa: B023
            "rms_norm": (lambda i: rms_norm.execute("triton", (y[i], x[i], norm, eps)), 2 * h),  # noqa: B023
            "add_rms_norm": (lambda i: add_rms_norm.execute("triton", (x[i], x[i], y[i], norm, eps)), 4 * h),  # noqa: B023
            "silu_mul": (lambda i: silu_mul.execute("triton", (act[i], gate_up[i])), 3 * width),  # noqa: B023
            "rotary_kv_write": (
                lambda i: rotary_kv_write.execute("triton", (qkv[i], *rope)),  # noqa: B023
                2 * qkv_width + MODEL.kv_size,
            ),
        }
        for name, (launch, numbers) in kernels.items():
            for early in (True, False):
                with contextlib.nullcontext() if early else without_early_start():
                    found = time_graph(lambda launch=launch: [launch(i) for i in range(count)])  # type: ignore[misc]
                row: dict[str, Any] = {"kernel": name, "tokens": t, "early_start": early}
                row |= {key: value / count for key, value in found.items()}
                rows.append(row | {"GB_per_s": numbers * t * 2 / row["median_us"] / 1e3})
                show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """One line."""
    print(
        "  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    )


@torch.inference_mode()
def main(out: str | Path, parts: list[str], processes: int, tokens: tuple[int, ...], quick: bool) -> None:
    """Run ``parts`` and write them to ``out``. RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("decoder_bench needs an NVIDIA GPU, and torch sees none")
    figures: dict[str, Any] = {"model": MODEL.name, "context": CONTEXT}
    variants = {name: how for name, how in VARIANTS.items() if not set(tokens).isdisjoint(ONLY.get(name, tokens))}
    if "products" in parts:
        start = time.perf_counter()
        product_sweep.compile_all(processes, quick)
        compiled = time.perf_counter()
        figures["products"] = product_sweep.sweep_products(quick)
        for row in product_sweep.best(figures["products"]):
            show(row)
        plans = product_sweep.best_plans(figures["products"])
        print(product_sweep.as_python(plans))
        figures["plans"] = product_sweep.as_python(plans)
        seconds = compiled - start, time.perf_counter() - compiled
        print(f"{len(figures['products'])} cases: compiled in {seconds[0]:.0f} s, timed in {seconds[1]:.0f} s")
        # Beside the plans of other token counts, and early at all of them: the stack shows both.
        merged = dict(sorted((QWEN3_0_6B_H200 | plans).items()))
        variants["measured"] = {"plans": merged, "early": max(tokens)}
        variants["measured late"] = {"plans": late(merged), "early": max(tokens)}
        write_result(out, "decoder", figures)
        torch.cuda.empty_cache()
    if {"stack", "agreement"} & set(parts):
        stack = Stack(variants, tokens)
        for variant in variants if "agreement" in parts else ():
            figures[f"agreement of {variant}"] = stack.agreement(variant)
        figures |= {"stack": stack.timings()} if "stack" in parts else {}
        write_result(out, "decoder", figures)
        del stack
        torch.cuda.empty_cache()
    figures |= {"memory": memory_kernels()} if "memory" in parts else {}
    if "matvec" in parts:
        figures["matvec"] = product_sweep.sweep_matvecs()
        for row in figures["matvec"]:
            show(row)
    write_result(out, "decoder", figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="decoder_bench.json")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="of stack and agreement")
    parser.add_argument("--quick", action="store_true", help="about 150 products instead of 550")
    arguments = parser.parse_args()
    counts = tuple(int(count) for count in arguments.tokens.split(","))
    main(arguments.out, arguments.parts.split(","), arguments.processes, counts, arguments.quick)
