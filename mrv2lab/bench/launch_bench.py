"""Host time of one kernel launch: through Triton, through the cache of launches, and through the runtime's chokepoint.

    python -m mrv2lab.bench.launch_bench --out FILE

Four preparation kernels over one request (so that the device is never the slower one), a segment of the same runtime
and a PyTorch fill to compare with. ``op`` has the same arguments each time, as most launches of a step have. ``parts``
splits a cached launch: describing its arguments, and the C launcher; ``again`` makes it without a description.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from mrv2lab.bench.result import summary, write_result
from mrv2lab.ops._launch import CachedLauncher
from mrv2lab.ops.combine_tokens import combine_tokens
from mrv2lab.ops.gather_block_tables import gather_block_tables
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.ops.slot_mapping import slot_mapping
from mrv2lab.runtime import Runtime, make_runtime

LAUNCHES = 128
"""A batch of launches that is timed as one; the driver's queue holds more."""
MAX_NUM_REQS, MAX_BLOCKS, TOKENS = 1024, 256, 4096


def host_us(launch: Callable[[], Any], batches: int) -> dict[str, float]:
    """Host microseconds of one ``launch``, each sample the mean of a batch that begins on an idle device."""
    samples = []
    for _ in range(batches + 3):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(LAUNCHES):
            launch()
        samples.append((time.perf_counter_ns() - start) / 1e3 / LAUNCHES)
    torch.cuda.synchronize()
    return summary(samples[3:])


def make_launches(rt: Runtime) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Preparation ops and their arguments, by name; one request, tables of the usual sizes."""

    def zeros(shape: Any, dtype: torch.dtype, name: str, place: str = "device") -> torch.Tensor:
        return rt.zeros(shape, dtype, name=name, place=place)

    i32, i64 = torch.int32, torch.int64
    rows, starts = zeros(MAX_NUM_REQS, i32, "rows"), rt.adopt(torch.arange(MAX_NUM_REQS + 1, dtype=i32), "starts")
    computed, prefill = zeros(MAX_NUM_REQS, i32, "computed"), zeros(MAX_NUM_REQS, i32, "prefill", "uva")
    positions, seq_lens = zeros(TOKENS, i64, "positions"), zeros(MAX_NUM_REQS, i32, "seq_lens")
    tables = (zeros((MAX_NUM_REQS, MAX_BLOCKS), i32, "table"),)
    inputs = (zeros((MAX_NUM_REQS, MAX_BLOCKS), i32, "inputs"),)
    counts = zeros((1, MAX_NUM_REQS), i32, "counts", "uva")
    pointers, input_pointers = (
        rt.adopt(torch.tensor([one[0].data_ptr()], dtype=torch.uint64), name)
        for one, name in ((tables, "pointers"), (inputs, "input_pointers"))
    )
    strides, sizes = rt.adopt(torch.tensor([MAX_BLOCKS]), "strides"), rt.adopt(torch.tensor([16], dtype=i32), "sizes")
    tokens, drafts = zeros(TOKENS, i32, "tokens"), zeros((MAX_NUM_REQS, 1), i64, "drafts")
    last, logits = zeros(MAX_NUM_REQS, i64, "last"), zeros(MAX_NUM_REQS, i64, "logits")
    slots = zeros((1, TOKENS), i64, "slots")
    return {
        "pos_seq_lens": (pos_seq_lens, (rows, starts, computed, positions, seq_lens, 1)),
        "combine_tokens": (
            combine_tokens,
            (rows, starts, starts, seq_lens, prefill, last, drafts, tokens, logits, 1),
        ),
        "gather_block_tables": (
            gather_block_tables,
            (rows, counts, tables, pointers, inputs, input_pointers, strides, 1, 1),
        ),
        "slot_mapping": (
            slot_mapping,
            (rows, starts, positions, tables, pointers, strides, sizes, slots, 1),
        ),
    }


class _Args:
    """Stands where a kernel does and keeps what its launcher passes."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._keep, grid)

    def _keep(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        self.grid, self.args, self.options = grid, args, options


def parts(launcher: CachedLauncher, op: Any, args: tuple[Any, ...], batches: int) -> dict[str, Any]:
    """Host microseconds of a cached launch's two larger parts, and of the launch made again (``ops/_repeat.py``)."""
    given = _Args()
    op.launch(given, *args)
    made = launcher.launch(given.grid, *given.args, **given.options)
    assert made is not None
    stream = torch.cuda.current_stream().cuda_stream
    call = partial(made.entry.call, *made.grid, stream, *made.behind_stream(made.passed))
    return {
        "describe": host_us(partial(launcher.describe, given.args, given.options), batches),
        "c_launcher": host_us(call, batches),
        "again": host_us(partial(launcher.again, made, made.behind_stream(made.passed)), batches),
    }


def bench(rt: Runtime, batches: int = 50) -> dict[str, Any]:
    """Host microseconds of one launch by op and way."""
    figures: dict[str, Any] = {"launches_a_batch": LAUNCHES, "host_us": {}}
    for name, (op, args) in make_launches(rt).items():
        plain, cached = op.kernel.load(), op.kernel.launcher()
        row: dict[str, Any] = {
            "triton": host_us(partial(op.launch, plain, *args), batches),
            "cached": host_us(partial(op.launch, cached, *args), batches),
            "op": host_us(partial(op, rt, *args), batches),
        }
        if isinstance(cached, CachedLauncher):
            row["parts"] = parts(cached, op, args, batches)
        figures["host_us"][name] = row
    target = rt.zeros(MAX_NUM_REQS, torch.int32, name="target")
    rt.register("fill", lambda tensor: tensor.fill_(1))
    figures["host_us"]["fill"] = {
        "torch": host_us(partial(target.fill_, 1), batches),
        "run": host_us(partial(rt.run, "fill", target, writes=(target,)), batches),
    }
    return figures


def main(out: Annotated[Path, typer.Option(help="JSON file to write.")]) -> None:
    """Run it on the GPU."""
    rt = make_runtime()
    if rt.device.type != "cuda":
        raise SystemExit("launch_bench times launches on a GPU; torch sees none here")
    with torch.inference_mode():
        write_result(out, "launch_cuda", bench(rt))
    typer.echo(out.read_text())


if __name__ == "__main__":
    typer.run(main)
