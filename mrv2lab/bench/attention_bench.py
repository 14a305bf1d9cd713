# mypy: disable-error-code="no-untyped-call"
"""What our attention kernels cost a layer on a GPU, by shape and by how the kernel is cut.

    python -m mrv2lab.bench.attention_bench --out attention_bench.json [--only mixed] [--quick]

A figure is the median over replays of a graph that holds one launch for each of several layers, whose caches together
are larger than the second-level cache, divided by the layers: launch gaps inside a graph are part of it. Every row says
how far its output is from the definition's.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mrv2lab.bench.result import write_result
from mrv2lab.ops import decode_attention as decode
from mrv2lab.ops import paged_attention as paged
from mrv2lab.ops._decode_cut import Cut, cut, scratch_shapes
from mrv2lab.ops.paged_attention import Tiling

HEADS, KV_HEADS, D, BLOCK_SIZE = 16, 8, 128, 16
"""Qwen3-0.6B's."""
SCALE = D**-0.5
REPLAYS, BESIDE = 25, 200e6
"""Replays that count; bytes of cache that a graph goes through at least, so that nothing is read twice from L2."""


@dataclass(frozen=True)
class Shape:
    """``requests`` of ``queries`` tokens each at the end of ``context`` tokens, and one with a ``prompt`` if not 0."""

    requests: int
    context: int
    queries: int = 1
    prompt: int = 0

    @property
    def name(self) -> str:
        queries = f", {self.queries} queries" if self.queries > 1 else ""
        return f"{self.requests} x {self.context}" + queries + (f", prompt of {self.prompt}" if self.prompt else "")

    @property
    def counts(self) -> list[int]:
        """Queries of every request."""
        return [self.queries] * self.requests + ([self.prompt] if self.prompt else [])

    @property
    def lengths(self) -> list[int]:
        """Tokens of every request."""
        return [self.context] * self.requests + ([self.prompt] if self.prompt else [])

    @property
    def kv_bytes(self) -> int:
        return sum(self.lengths) * KV_HEADS * D * 2 * 2

    @property
    def flops(self) -> float:
        seen = sum(n * (length - n) + n * (n + 1) / 2 for n, length in zip(self.counts, self.lengths, strict=True))
        return 4.0 * D * HEADS * seen


DECODE = (
    Shape(256, 152), Shape(256, 256), Shape(256, 384), Shape(128, 512), Shape(64, 1088), Shape(16, 512), Shape(1, 128),
    Shape(1, 256), Shape(1, 384), Shape(1, 2048),
)  # fmt: skip
MIXED = tuple(Shape(n, context, prompt=128) for n, context in ((256, 275), (128, 275), (64, 275), (4, 2048), (4, 8192)))
"""A newcomer among decodes, as in every step of a server that is full."""
PREFILL = (Shape(64, 1024, 1024), Shape(256, 128, 128), Shape(8, 2048, 512))


def decode_cuts(shape: Shape) -> Iterator[Cut]:
    """The variants of interest for a shape: what the launcher picks, and its neighbours."""
    yield default_cut(shape)
    if shape.requests >= 128:
        yield Cut(16, 1, 1, 1)
        yield Cut(16, 1, 1, 1, maxnreg=128)
        yield Cut(16, 1, 1, 1, maxnreg=112)
        yield Cut(16, 1, 1, 2)
        yield Cut(16, 1, 1, 2, maxnreg=128)
        yield Cut(16, 2, 1, 1)
        yield Cut(16, 1, 2, 1, maxnreg=128)
        yield Cut(16, 1, 4, 1, maxnreg=128, least=128)
    elif shape.requests >= 16:
        for splits in (1, 2, 3, 4, 8):
            yield Cut(16, 1, splits, 2)
            yield Cut(16, 1, splits, 1, maxnreg=128)
        yield Cut(16, 1, 2, 3)
        yield Cut(16, 2, 4, 1)
        yield Cut(16, 2, 4, 2)
    else:
        for splits in (8, 16, 32):
            for warps in (1, 2, 4):
                for depth in (0, 1, 2):
                    yield Cut(16, warps, splits, depth)


def default_cut(shape: Shape) -> Cut:
    """What the launcher picks."""
    return cut(len(shape.counts), KV_HEADS, _width(shape) * BLOCK_SIZE, 2)


TILINGS = (
    Tiling(128, 64, 8, 2),
    Tiling(128, 64, 8, 2, maxnreg=128),
    Tiling(128, 64, 8, 2, plain_tiles=False, maxnreg=128),
    Tiling(128, 64, 8, 3, maxnreg=128),
    Tiling(128, 32, 8, 3, maxnreg=128),
    Tiling(64, 64, 4, 2, maxnreg=160),
    Tiling(64, 64, 4, 2, plain_tiles=False, maxnreg=160),
    Tiling(64, 32, 4, 3, maxnreg=128),
    Tiling(64, 32, 4, 3, plain_tiles=False, maxnreg=128),
)


def _width(shape: Shape) -> int:
    """Entries of a row of the block table: those of a model length twice the context, 512 tokens at least."""
    return max(512, 2 * shape.context) // BLOCK_SIZE


@dataclass
class Batch:
    """Device tensors of a shape, with a cache pair for each of several layers."""

    out: torch.Tensor
    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    # block_table, seq_lens, query_start_loc
    meta: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    # partial, partial_lse, counters
    scratch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    # the definition's output of the first requests, on the first layer
    want: torch.Tensor


def make_batch(shape: Shape, device: str = "cuda", layers: int | None = None) -> Batch:
    """Random keys and values in shuffled blocks; entries of the table past a request's end point nowhere."""
    generator = torch.Generator(device).manual_seed(0)
    r, used = len(shape.counts), [-(-length // BLOCK_SIZE) for length in shape.lengths]
    layers = layers or min(96, max(3, -(-int(BESIDE) // shape.kv_bytes)))
    blocks = torch.randperm(sum(used), generator=generator, device=device).int()
    table = torch.full((r, _width(shape)), 2**30, dtype=torch.int32, device=device)
    for row, mine in zip(table, blocks.split(used), strict=True):
        row[: len(mine)] = mine
    size = (sum(used), BLOCK_SIZE, KV_HEADS, D)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    caches = [(normal(*size), normal(*size)) for _ in range(layers)]
    q = normal(sum(shape.counts), HEADS, D)
    seq_lens = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *itertools.accumulate(shape.counts)], dtype=torch.int32, device=device)
    partial, lse, counters = scratch_shapes(HEADS, KV_HEADS, D)
    scratch = (
        torch.empty(partial, device=device),
        torch.empty(lse, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )
    checked = max(1, min(r, 2**25 // (shape.queries * shape.context)))  # the definition makes its scores in full
    want = torch.empty_like(q[: sum(shape.counts[:checked])])
    some = (table[:checked], seq_lens[:checked], starts[: checked + 1], max(shape.counts))
    paged.paged_attention.execute("spec", (want, q, *caches[0], *some, SCALE, 0))
    return Batch(torch.empty_like(q), q, caches, (table, seq_lens, starts), scratch, want)


def measure(launch: Callable[[int], None], layers: int) -> dict[str, float]:
    """Microseconds of ``launch(layer)``: median and quartiles over the replays of a graph of all layers."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            launch(layer)
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [1e3 * a.elapsed_time(b) / layers for a, b in itertools.pairwise(events)]
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_us": middle, "q1_us": low, "q3_us": high}


def _variant(how: Cut | Tiling) -> str:
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(how).items() if value is not None)


def _row(shape: Shape, batch: Batch, variant: str, launch: Callable[[int], None]) -> dict[str, Any]:
    row: dict[str, Any] = {"shape": shape.name, "variant": variant}
    batch.out.fill_(float("nan"))
    try:
        row |= measure(launch, len(batch.caches))
    except Exception as error:  # a variant that does not fit the machine is a finding, not the end of the run
        return row | {"error": f"{type(error).__name__}: {error}"[:200]}
    row["GB_per_s"] = shape.kv_bytes / row["median_us"] / 1e3
    row["TFLOP_per_s"] = shape.flops / row["median_us"] / 1e6
    launch(0)
    row["max_error"] = (batch.out[: len(batch.want)].float() - batch.want.float()).abs().max().item()
    return row


def rows(quick: bool = False, only: str = "") -> Iterator[dict[str, Any]]:
    """A row for each shape and variant; ``quick`` measures what the launchers pick and nothing else."""
    if only in ("", "mixed"):
        yield from mixed_rows(quick)
    kernel = decode.decode_attention.kernel.load()
    for shape in DECODE if only in ("", "decode") else ():
        batch = make_batch(shape)
        for how in dict.fromkeys(itertools.islice(decode_cuts(shape), 1 if quick else None)):

            def one(layer: int, batch: Batch = batch, how: Cut = how) -> None:
                q, caches = (batch.out, batch.q), batch.caches[layer]
                decode.launch(kernel, *q, *caches, *batch.meta, SCALE, 0, *batch.scratch, how)

            yield _row(shape, batch, _variant(how), one) | {"default": how == default_cut(shape)}
        del batch
        torch.cuda.empty_cache()
    kernel = paged.paged_attention.kernel.load()
    for shape in PREFILL if only in ("", "prefill") else ():
        batch = make_batch(shape)
        picked = paged.tiling(shape.queries, HEADS // KV_HEADS, D, 2)
        for tiling in dict.fromkeys((picked, *(() if quick else TILINGS))):

            def many(layer: int, batch: Batch = batch, tiling: Tiling = tiling, n: int = shape.queries) -> None:
                q, caches = (batch.out, batch.q), batch.caches[layer]
                paged.launch(kernel, *q, *caches, *batch.meta, n, SCALE, 0, False, tiling)

            yield _row(shape, batch, _variant(tiling), many) | {"default": tiling == picked}
        del batch
        torch.cuda.empty_cache()


def mixed_rows(quick: bool = False) -> Iterator[dict[str, Any]]:
    """Single queries and a prompt: all in ``paged_attention``, or each in its own kernel, as a graph has it."""
    singles, any_number = decode.decode_attention.kernel.load(), paged.paged_attention.kernel.load()
    for shape in MIXED:
        batch = make_batch(shape)
        picked = paged.tiling(shape.prompt, HEADS // KV_HEADS, D, 2)
        for tiling in dict.fromkeys((picked, *(() if quick else TILINGS))):
            for split in (False, True):

                def both(
                    layer: int, shape: Shape = shape, batch: Batch = batch, tiling: Tiling = tiling, split: bool = split
                ) -> None:
                    common = (batch.out, batch.q, *batch.caches[layer], *batch.meta)
                    if split:
                        decode.launch(singles, *common, SCALE, 0, *batch.scratch, default_cut(shape))
                    paged.launch(any_number, *common, shape.prompt, SCALE, 0, split, tiling)

                variant = ("decode, " if split else "") + f"paged {_variant(tiling)}"
                yield _row(shape, batch, variant, both) | {"default": split and tiling == picked}
        del batch
        torch.cuda.empty_cache()


def copy_bandwidth() -> float:
    """GB/s of an elementwise copy of 1 GB, reads and writes counted."""
    source = torch.zeros(2**29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)

    def copy(layer: int) -> None:
        torch.mul(source, 1, out=target)

    return 2 * source.nbytes / measure(copy, 1)["median_us"] / 1e3


def main() -> None:
    """Measure, print a line a row, and write the JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", choices=("decode", "mixed", "prefill"), default="")
    parser.add_argument("--quick", action="store_true", help="only what the launchers pick")
    options = parser.parse_args()
    copy = copy_bandwidth()
    print(f"copy {copy:.0f} GB/s")
    found = []
    for row in rows(options.quick, options.only):
        found.append(row)
        figures = row.get("error") or (
            f"{row['median_us']:8.2f} us {row['GB_per_s']:6.0f} GB/s {row['TFLOP_per_s']:6.1f} TFLOP/s "
            f"error {row['max_error']:.4f}"
        )
        print(f"{row['shape']:24s} {'*' if row['default'] else ' '} {row['variant']:65s} {figures}", flush=True)
    write_result(options.out, "attention_bench", {"copy_GB_per_s": copy, "rows": found})


if __name__ == "__main__":
    main()
