"""Times of the decoder's products by kernel and tile: where the tables of model/products.py come from.

A case is one CUDA graph over LAYERS layers' weights, so that each weight comes from memory, as in a step. Between two
products stands the norm that stands there in a decoder, with its part in the time: early starts overlap, and partial
sums cost their reader. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from mrv2lab.config import QWEN3_0_6B
from mrv2lab.model.products import EARLY, FEW, Plan, Products, Split, matvec_tile
from mrv2lab.ops._pdl import without_early_start
from mrv2lab.ops.add_rms_norm import add_rms_norm
from mrv2lab.ops.gather_matvec import gather_matvec
from mrv2lab.ops.matvec_add import matvec_add
from mrv2lab.ops.norm_matvec import norm_matvec
from mrv2lab.ops.norm_matvec_silu import norm_matvec_silu
from mrv2lab.ops.silu_mul import silu_mul
from mrv2lab.ops.small_mm import small_mm
from mrv2lab.ops.small_mm_silu import small_mm_silu
from mrv2lab.ops.sum_add_rms_norm import sum_add_rms_norm

MODEL = QWEN3_0_6B
LAYERS, REPLAYS, REPEATS = MODEL.num_hidden_layers, 10, 7
TOKENS = (8, 16, 32, 64, 128, 256)
QKV, Q, H, I = (  # noqa: E741
    MODEL.q_size + 2 * MODEL.kv_size,
    MODEL.q_size,
    MODEL.hidden_size,
    MODEL.intermediate_size,
)
SHAPES = {"qkv": (QKV, H), "o_proj": (H, Q), "gate_up": (2 * I, H), "down": (H, I)}
"""Product -> (N, K)."""
QUICK = (64, 128, 256)
MATVEC_TILES = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (8, 2), (4, 4), (8, 4), (16, 4)]
"""(weight rows, warps) of a matrix-vector program."""


class Case(NamedTuple):
    """A product at some number of tokens, by ``split`` (None: by the library)."""

    product: str
    tokens: int
    split: Split | None


def splits(product: str, tokens: int) -> Iterator[Split]:
    """What is worth a try: half a program to two programs a processor, and tiles that registers hold."""
    n, k = SHAPES[product]
    width = n // 2 if product == "gate_up" else n
    rows = sorted({min(most, max(16, tokens)) for most in (64, 128, 256)} | ({32} if tokens == 64 else set()))
    for block_m, block_n, block_k, parts in itertools.product(rows, (16, 32, 64, 128), (64, 128), (1, 2, 3, 4, 6)):
        if parts > 1 and (product in ("qkv", "gate_up") or k % (parts * block_k)):
            continue
        programs = -(-tokens // block_m) * -(-width // block_n) * parts
        columns = block_n * (2 if product == "gate_up" else 1)
        if not 60 <= programs <= 300 or block_m * columns > 128 * 128 or (block_m >= 64 and columns < 32):
            continue
        stages = 4 if block_k == 64 else 3
        if stages * (block_m + columns) * block_k * 2 <= 200 * 1024:
            for warps in (8,) if block_m == 256 else (4, 8) if block_m * columns >= 64 * 64 else (4,):
                yield Split((block_m, block_n, block_k, warps, stages), parts)


def promising(product: str, tokens: int) -> Iterator[Split]:
    """The few that are worth it for 64 to 256 tokens: about one program a processor, or two that fit into one."""
    n, k = SHAPES[product]
    split_up, gated = product in ("o_proj", "down"), product == "gate_up"
    for block_m, block_n, parts in itertools.product((64, 128), (16, 32, 64, 128), (1, 2, 4, 8) if split_up else (1,)):
        columns = block_n * (2 if gated else 1)
        programs = -(-tokens // block_m) * -(-(n // 2 if gated else n) // block_n) * parts
        least = 96 if split_up else 60
        if block_m > max(64, tokens) or columns < 32 or block_m * columns > 128 * 128 or not least <= programs <= 264:
            continue
        for block_k, stages in ((64, 4), (128, 3)):
            memory = stages * (block_m + columns) * block_k * 2
            if (
                k % (parts * block_k)
                or memory > 200 * 1024
                or (programs > 132 and (block_k == 128 or memory > 113_000))
            ):
                continue
            for warps in (4, 8):
                if block_m * columns >= 64 * 128 if warps == 8 else block_m * columns <= 64 * 128:
                    yield Split((block_m, block_n, block_k, warps, stages), parts)


def cases(quick: bool = False) -> list[Case]:
    """Everything that is timed. ``quick``: what is promising at 64, 128 and 256 tokens, and plans as they are."""
    found = []
    for product, tokens in itertools.product(SHAPES, QUICK if quick else TOKENS):
        tried = [*(promising if quick else splits)(product, tokens)]
        now: Split | None = getattr(_plan(tokens), product)
        if now is not None and now not in tried:
            tried.append(now)
        found += [Case(product, tokens, None), *(Case(product, tokens, split) for split in tried)]
    return found


def _plan(tokens: int) -> Plan:
    """What model/products.py takes."""
    return Products("triton", MODEL).plan(tokens)


def time_graph(queue: Callable[[], object], replays: int = REPLAYS, repeats: int = REPEATS) -> dict[str, float]:
    """Microseconds of one replay of what ``queue`` launches: median, least and greatest over ``repeats``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        queue()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        queue()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / replays)
    return {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}


class Bench:
    """Weights of ``layers`` layers and the buffers of a step."""

    def __init__(self, layers: int = LAYERS) -> None:
        def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, device="cuda") * scale).bfloat16()

        self.layers = layers
        self.weights = {name: [randn(*shape, scale=0.02) for _ in range(layers)] for name, shape in SHAPES.items()}
        rows = max(TOKENS)
        self.norm = randn(H)
        self.hidden, self.residual = randn(rows, H), randn(rows, H)
        self.qkv, self.attn_out = randn(rows, QKV), randn(rows, Q)
        self.gate_up, self.act = randn(rows, 2 * I), randn(rows, I)
        self.partials = torch.zeros(8, rows, H, device="cuda")

    def queue(self, case: Case) -> None:
        """One layer after the other: the norm and the product, or the product and its norm."""
        product, t, split = case
        hidden, residual = self.hidden[:t], self.residual[:t]
        norm = (hidden, hidden, residual, self.norm, MODEL.rms_norm_eps)
        x = {"qkv": hidden, "gate_up": hidden, "o_proj": self.attn_out[:t], "down": self.act[:t]}[product]
        for weight in self.weights[product]:
            if product in ("o_proj", "down"):
                if split is None:
                    torch.mm(x, weight.t(), out=hidden)
                    add_rms_norm.execute("triton", norm)
                else:
                    parts = self.partials[: split.splits, :t]
                    small_mm.execute("triton", (parts, x, weight, split.tile))
                    sum_add_rms_norm.execute("triton", (hidden, parts, *norm[2:]))
                continue
            add_rms_norm.execute("triton", norm)
            if product == "qkv":
                if split is None:
                    torch.mm(x, weight.t(), out=self.qkv[:t])
                else:
                    small_mm.execute("triton", (self.qkv[:t].unsqueeze(0), x, weight, split.tile))
            elif split is None:
                torch.mm(x, weight.t(), out=self.gate_up[:t])
                silu_mul.execute("triton", (self.act[:t], self.gate_up[:t]))
            else:
                small_mm_silu.execute("triton", (self.act[:t], x, weight, split.tile))

    def matvecs(self, t: int, tiles: dict[str, tuple[int, int]]) -> None:
        """A decoder layer's four matrix-vector products, layer after layer."""
        residual, eps = self.residual[:t], MODEL.rms_norm_eps
        for qkv, o_proj, gate_up, down in zip(*self.weights.values(), strict=True):
            norm_matvec.execute("triton", (self.qkv[:t], residual, self.norm, qkv, eps, tiles["qkv"]))
            matvec_add.execute("triton", (residual, self.attn_out[:t], o_proj, tiles["o_proj"]))
            args = (self.act[:t], residual, self.norm, gate_up, eps, tiles["gate_up"])
            norm_matvec_silu.execute("triton", args)
            matvec_add.execute("triton", (residual, self.act[:t], down, tiles["down"]))

    def default_tiles(self) -> dict[str, tuple[int, int]]:
        """What model/products.py takes."""
        return {name: matvec_tile(made[0], 2 if name == "gate_up" else 1) for name, made in self.weights.items()}


def sweep_products(quick: bool = False) -> list[dict[str, Any]]:
    """One row a case: product, tokens, tile, splits (tile None: the library) and microseconds a layer. Kernels start
    early where they do in the decoder."""
    bench, rows = Bench(), []
    for case in cases(quick):
        row: dict[str, Any] = {"product": case.product, "tokens": case.tokens}
        row |= {"tile": None, "splits": 1} if case.split is None else case.split._asdict()
        try:
            with without_early_start() if case.tokens > EARLY else contextlib.nullcontext():
                found = time_graph(lambda case=case: bench.queue(case), repeats=REPEATS)  # type: ignore[misc]
            row |= {name: value / LAYERS for name, value in found.items()}
        except Exception as error:  # out of shared memory, say: a tile that is no candidate
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        rows.append(row)
    return rows


def best(rows: list[dict[str, Any]], count: int = 3) -> list[dict[str, Any]]:
    """The fastest few of each product and token count, the library's in front."""
    found = []
    for product, tokens in itertools.product(SHAPES, sorted({row["tokens"] for row in rows})):
        mine = [row for row in rows if (row["product"], row["tokens"]) == (product, tokens) and "median_us" in row]
        library = [row for row in mine if row["tile"] is None]
        found += library + sorted((row for row in mine if row["tile"]), key=lambda row: row["median_us"])[:count]
    return found


def best_plans(rows: list[dict[str, Any]]) -> dict[int, Plan]:
    """Largest token count -> the fastest way of every product. Raises ``ValueError`` if none of a product's ran."""
    plans = {}
    for tokens in sorted({row["tokens"] for row in rows}):
        ways: dict[str, Split | None] = {}
        for product in SHAPES:
            mine = [row for row in rows if (row["product"], row["tokens"]) == (product, tokens) and "median_us" in row]
            fastest = min(mine, key=lambda row: row["median_us"])
            ways[product] = Split(tuple(fastest["tile"]), fastest["splits"]) if fastest["tile"] else None
        plans[tokens] = Plan(**ways)
    return plans


def sweep_matvecs() -> list[dict[str, Any]]:
    """Microseconds a layer of the four products, one tile at a time changed from the default; and of the logits."""
    bench, rows = Bench(), []
    default = bench.default_tiles()
    for t in (1, FEW):
        changes = [("default", (0, 0)), *itertools.product(SHAPES, MATVEC_TILES)]
        for name, tile in changes:
            tiles = default if name == "default" else default | {name: tile}
            row: dict[str, Any] = {"product": name, "tokens": t, "tile": tile}
            k = SHAPES.get(name, (0, 0))[1]
            if tile[0] * k * (2 if name == "gate_up" else 1) > tile[1] * 32 * 256:
                continue  # more than the registers hold
            found = time_graph(lambda t=t, tiles=tiles: bench.matvecs(t, tiles))  # type: ignore[misc]
            rows.append(row | {key: value / LAYERS for key, value in found.items()})
    head = (torch.randn(MODEL.vocab_size, H, device="cuda") * 0.02).bfloat16()
    for t in (1, FEW):
        out = torch.empty(t, MODEL.vocab_size, dtype=torch.bfloat16, device="cuda")
        picked, indices = torch.empty_like(bench.hidden[:t]), torch.arange(t, device="cuda")

        def library(out: Any = out, picked: Any = picked, indices: Any = indices) -> None:
            torch.index_select(bench.hidden, 0, indices, out=picked)
            torch.mm(picked, head.t(), out=out)

        rows.append({"product": "logits", "tokens": t, "tile": None} | time_graph(library))
        for tile in MATVEC_TILES:
            if tile[0] * H <= tile[1] * 32 * 256:
                args = (out, bench.hidden, indices, head, tile)
                found = time_graph(lambda args=args: gather_matvec.execute("triton", args))  # type: ignore[misc]
                rows.append({"product": "logits", "tokens": t, "tile": tile} | found)
    return rows


def as_python(plans: dict[int, Plan]) -> str:
    """What belongs into model/products.py."""
    lines = []
    for tokens, plan in plans.items():
        ways = (f"Split({way.tile}{f', {way.splits}' if way.splits > 1 else ''})" if way else "None" for way in plan)
        lines.append(f"    {tokens}: Plan(\n        {', '.join(ways)},\n    ),\n")
    return "{\n" + "".join(lines) + "}"


def compile_share(share: int, shares: int, quick: bool) -> None:
    """Compile every ``shares``-th case into Triton's cache on disk."""
    bench = Bench(layers=1)
    for case in kernels(quick)[share::shares]:
        try:
            with without_early_start() if case.tokens > EARLY else contextlib.nullcontext():
                bench.queue(case)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{case}: {type(error).__name__}: {error}"[:200])


def kernels(quick: bool) -> list[Case]:
    """One case for each kernel: a tile's is the same for any number of tokens, but for early starts."""
    found = {(case.product, case.split, case.tokens > EARLY): case for case in cases(quick)}
    return list(found.values())


def compile_all(processes: int, quick: bool = False) -> None:
    """Compile all cases in parallel: one process does two a second."""
    code = "import sys; from mrv2lab.bench.product_sweep import compile_share; compile_share(*map(int, sys.argv[1:]))"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(i), str(processes), str(int(quick))],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for i in range(processes)
    ]
    for process in running:
        process.wait()
