# mypy: disable-error-code="no-untyped-def, no-untyped-call, operator"
"""What sampling costs on a GPU, at 256 rows x 151,936 tokens, and whether the GPU agrees with the definition.

    python -m mrv2lab.bench.noise_bench --out noise_bench.json

Prints a line a figure and writes them all as JSON: milliseconds by CUDA events, median and interquartile range of 30
after 10 to warm up, queued behind a sleeping GPU so that the host's launches do not count.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mrv2lab.bench.result import write_result
from mrv2lab.ops._op import Op, jit
from mrv2lab.ops.argmax import argmax_blocks, argmax_rows, num_blocks, num_warps, reduce_blocks
from mrv2lab.ops.gumbel import gumbel_blocks, gumbel_sample, num_slices
from mrv2lab.ops.noise import HASH_VERSION, gumbel, noise_probe, row_keys, token_bits, uniforms
from mrv2lab.ops.temperature import apply_temperature

tl: Any = None

ROWS, VOCAB = 256, 151_936
WARM_UP, REPEATS = 10, 30


@jit
def variant_kernel(
    local_max,
    local_arg,
    logits,
    seeds,
    positions,
    vocab,
    blocks,
    BITS: tl.constexpr,
    NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The block pass of Gumbel sampling at temperature 1 with other noise. BITS: "hash" (ours), "none" (the token id
    serves as bits), "philox" (Triton's own generator). NOISE: "exact" (ours) or "fast" (the GPU's logarithm)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    if BITS == "none":
        bits = token.to(tl.uint32)
    elif BITS == "philox":
        bits = tl.randint(tl.load(seeds + row) + tl.load(positions + row), token).to(tl.uint32, bitcast=True)
    else:
        k0, k1 = row_keys(tl.load(seeds + row), tl.load(positions + row))
        bits = token_bits(k0, k1, token)
    u, v = uniforms(bits)
    if NOISE == "exact":
        x += gumbel(u, v)
    else:
        x -= tl.log(tl.where(u < 0.25, u + u * u * (0.5 + u * (0.33333333 + u * 0.25)), -tl.log(v)))
    best, at = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(local_max + row * blocks + block, best)
    tl.store(local_arg + row * blocks + block, block * BLOCK + at)


class _Now:
    """A runtime that launches at once."""

    def kernel(self, op: Op, *args: Any) -> None:
        op.execute("triton", args)


def measure(launch: Callable[[], object]) -> dict[str, float]:
    """Median and quartiles of ``launch``'s milliseconds on the GPU."""
    import torch

    for _ in range(WARM_UP):
        launch()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    torch.cuda._sleep(50_000_000)  # about 25 ms, in which all launches are queued
    for start, end in events:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in events]
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_ms": middle, "iqr_ms": high - low, "min_ms": min(times), "max_ms": max(times)}


def batch(rows: int, vocab: int, seed: int = 0, device: str = "cuda") -> dict[str, Any]:
    """Arguments of the sampling ops for ``rows`` sampled requests."""
    import torch

    made = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=made) * 2).to(device)
    args = {
        "logits": logits,
        "expanded_idx_mapping": torch.randperm(rows, generator=made).int(),
        "temperature": torch.rand(rows, generator=made) + 0.3,
        "seeds": torch.randint(-(2**62), 2**62, (rows,), generator=made),
        "positions": torch.randint(0, 40_000, (rows,), generator=made),
        "logits_indices": torch.arange(rows),
    }
    return {name: tensor.to(device) for name, tensor in args.items()}


def outputs(rows: int, blocks: int, device: str = "cuda") -> tuple[Any, Any, Any]:
    import torch

    return (
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, blocks, dtype=torch.float32, device=device),
        torch.empty(rows, blocks, dtype=torch.int32, device=device),
    )


def timings() -> dict[str, dict[str, float]]:
    """Every variant at ROWS x VOCAB."""
    import torch

    rt, b = _Now(), batch(ROWS, VOCAB)
    logits, bf16 = b["logits"], b["logits"].bfloat16()
    rest = (b["expanded_idx_mapping"], b["temperature"], b["seeds"], b["positions"], b["logits_indices"])
    one = (rest[0], torch.ones_like(rest[1]), *rest[2:])
    out, peak, arg = outputs(ROWS, num_blocks(VOCAB))
    _, best, who = outputs(ROWS, num_slices(ROWS, VOCAB))
    table: dict[str, Callable[[], object]] = {}
    target = torch.empty_like(logits)
    table["copy fp32"] = lambda: target.copy_(logits)
    table["max fp32 (torch)"] = lambda: torch.argmax(logits, dim=1)
    table["gumbel_sample fp32"] = lambda: gumbel_sample(rt, out, best, who, logits, *rest, True)
    table["gumbel_sample bf16"] = lambda: gumbel_sample(rt, out, best, who, bf16, *rest, True)
    table["gumbel_sample fp32, T=1"] = lambda: gumbel_sample(rt, out, best, who, logits, *one, True)
    table["argmax_rows fp32"] = lambda: argmax_rows(rt, out, peak, arg, logits, rest[0])
    table["argmax_rows bf16"] = lambda: argmax_rows(rt, out, peak, arg, bf16, rest[0])
    table["reduce_blocks"] = lambda: reduce_blocks(rt, out, peak, arg)
    scratch, two = logits.clone(), one[1] + 1
    table["apply_temperature fp32"] = lambda: apply_temperature(rt, scratch, rest[0], two)
    for slices in (8, 12, 16, 24, 32, 64):
        _, p, a = outputs(ROWS, slices)
        for name, x in (("fp32", logits), ("bf16", bf16)):
            table[f"gumbel_blocks {name}, {slices} slices"] = lambda p=p, a=a, x=x: gumbel_blocks(
                rt, p, a, x, *rest, True
            )  # type: ignore[misc]
    kernel = variant_kernel.load()
    for bits in ("hash", "none", "philox"):
        for noise in ("exact", "fast"):

            def variant(bits: str = bits, noise: str = noise) -> None:
                kernel[(ROWS, num_blocks(VOCAB))](
                    peak, arg, logits, b["seeds"], b["positions"], VOCAB, num_blocks(VOCAB),
                    BITS=bits, NOISE=noise, BLOCK=4096, num_warps=num_warps(4096), enable_fp_fusion=noise == "fast",
                )  # fmt: skip

            table[f"block pass, T=1, bits {bits}, logarithm {noise}"] = variant
    found = {}
    for name, launch in table.items():
        found[name] = measure(launch)
        print(f"{name:55s} {found[name]['median_ms'] * 1e3:8.1f} us   IQR {found[name]['iqr_ms'] * 1e3:6.2f} us")
    found["copy fp32"]["GB_per_s"] = 2 * logits.nbytes / found["copy fp32"]["median_ms"] / 1e6
    print(f"copy bandwidth {found['copy fp32']['GB_per_s']:.0f} GB/s")
    return found


def agreement() -> dict[str, Any]:
    """GPU against the NumPy definition: the probe at 3 x 5,000 and 64 x 151,936, tokens, maxima and quotients."""
    import torch

    found: dict[str, Any] = {}
    for rows, vocab in ((3, 5000), (64, VOCAB)):
        seeds = torch.tensor([0, -5, 2**40 + 7] + [7 * i - 99 for i in range(61)])[:rows]
        positions = torch.tensor([0, 2**31 + 3, 2**30 + 12, *range(61)])[:rows]
        here = [torch.empty(rows, vocab, dtype=d) for d in (torch.int32, torch.float32, torch.float32)]
        there = [tensor.cuda() for tensor in here]
        noise_probe.execute("spec", (*here, seeds, positions))
        noise_probe.execute("triton", (*there, seeds.cuda(), positions.cuda()))
        for name, x, y in zip(("bits", "uniforms", "noise"), here, there, strict=True):
            found[f"{name} {rows}x{vocab} different"] = int((x != y.cpu()).sum())
        ulp = np.spacing(np.abs(here[2].numpy()))
        found[f"noise {rows}x{vocab} max ulp"] = float((np.abs(here[2].numpy() - there[2].cpu().numpy()) / ulp).max())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cpu = batch(16, VOCAB, seed=1, device="cpu")
        cpu["logits"] = cpu["logits"].to(dtype)
        cpu["logits"][3, 100:200] = float("nan")
        cpu["temperature"][:3] = torch.tensor([0.0, 1.0, 1e-3])
        cpu["expanded_idx_mapping"][7] = -1
        gpu = {name: tensor.cuda() for name, tensor in cpu.items()}
        made = []
        for backend, args, device in (("spec", cpu, "cpu"), ("triton", gpu, "cuda")):
            out, peak, arg = outputs(16, num_blocks(VOCAB), device)
            gumbel_blocks.execute(backend, (peak, arg, *args.values(), True))  # type: ignore[arg-type]
            reduce_blocks.execute(backend, (out, peak, arg))  # type: ignore[arg-type]
            greedy, peak2, arg2 = outputs(16, num_blocks(VOCAB), device)
            argmax_blocks.execute(backend, (peak2, arg2, args["logits"], args["expanded_idx_mapping"]))  # type: ignore[arg-type]
            reduce_blocks.execute(backend, (greedy, peak2, arg2))  # type: ignore[arg-type]
            scaled = args["logits"].clone()
            apply_temperature.execute(backend, (scaled, args["expanded_idx_mapping"], args["temperature"]))  # type: ignore[arg-type]
            made.append([t.cpu() for t in (out, peak, arg, greedy, peak2, arg2, torch.nan_to_num(scaled, nan=7.0))])
        names = ("sampled", "block scores", "block tokens", "greedy", "block maxima", "block argmax", "scaled logits")
        for name, x, y in zip(names, *made, strict=True):
            found[f"{name} {str(dtype)[6:]} different"] = int((x != y).sum())
    for name, value in found.items():
        print(f"{name:45s} {value}")
    return found


def flat_law(draws: int = 10_000_000, vocab: int = 50_000, seeds: int = 1000) -> dict[str, float]:
    """Chi-square of tokens drawn from equal logits (mrv2.md #44), over ``seeds`` seeds."""
    import torch

    rt, counts, chunk = _Now(), torch.zeros(vocab, dtype=torch.int64, device="cuda"), 200_000
    logits = torch.zeros(1, vocab, device="cuda").expand(chunk, vocab)
    out, peak, arg = outputs(chunk, num_blocks(vocab))
    indices = torch.arange(chunk, device="cuda")
    mapping = (indices % seeds).int()
    temperature, table = torch.ones(seeds, device="cuda"), torch.arange(seeds, device="cuda")
    for start in range(0, draws, chunk):
        positions = (indices + start) // seeds
        gumbel_sample(rt, out, peak, arg, logits, mapping, temperature, table, positions, indices, True)
        counts += torch.bincount(out, minlength=vocab)
    expected = draws / vocab
    chi2 = float(((counts.double() - expected) ** 2 / expected).sum())
    k = vocab - 1
    z = ((chi2 / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))  # Wilson and Hilferty
    law = {"draws": draws, "vocab": vocab, "chi2": chi2, "z": z, "p": math.erfc(z / math.sqrt(2)) / 2}
    print(f"flat law: {draws} draws over {vocab} tokens: chi2 {chi2:.0f}, z {z:.2f}, p {law['p']:.3g}")
    return law


def main(out_path: str | Path) -> None:
    """Run everything and write it to ``out_path``. RuntimeError without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("noise_bench needs an NVIDIA GPU, and torch sees none")
    print(torch.cuda.get_device_name())
    figures: dict[str, Any] = {"hash_version": HASH_VERSION, "rows": ROWS, "vocab": VOCAB, "repeats": REPEATS}
    figures |= {"agreement": agreement(), "timings": timings(), "flat_law": flat_law()}
    write_result(out_path, "noise_cuda", figures)
    print(f"written: {out_path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="noise_bench.json")
    main(parser.parse_args().out)
