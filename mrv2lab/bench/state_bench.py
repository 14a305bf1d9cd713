"""What the state primitives cost on a GPU: prompt tokens read through UVA, and staged writes.

    python -m mrv2lab.bench.state_bench --out FILE

UVA: ``prefill_inputs`` over 256 requests with ``all_token_ids`` in host memory, against the same table in device
memory, and the device bytes that the host table saves. Staged writes: ``StagedWriteTensor.apply_write`` of 256 diffs of
4 values. Preparation of 256 plain decodes: the separate launches against ``prepare_decode``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from mrv2lab.bench.result import summary, write_result
from mrv2lab.memory import StagedWriteTensor
from mrv2lab.ops.prefill_inputs import prefill_inputs
from mrv2lab.protocol import RequestData, SamplingParams
from mrv2lab.runner.prepare import launch_inputs, prepare_decodes, prepare_inputs, upload_batch
from mrv2lab.runtime import POLICIES, Runtime, make_runtime
from mrv2lab.state import BlockTables, HostBatch, InputBuffers, RequestState

NUM_REQS = 256
MAX_NUM_REQS, MAX_MODEL_LEN = 1024, 4096


def device_us(rt: Runtime, launch: Any, repeats: int = 50) -> dict[str, float]:
    """Device microseconds of one launch, by events, queued behind enough work that the host is ahead."""
    spin = rt.zeros(64 * 1024 * 1024, torch.float32, name="spin")
    samples = []
    for _ in range(repeats + 5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(16):  # about 2 ms
            spin.add_(1.0)
        begin.record()
        launch()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    return summary(samples[5:])


def bench_uva(rt: Runtime) -> dict[str, Any]:
    """The same kernel over the same tokens, the table in host or in device memory."""
    figures: dict[str, Any] = {
        "table": [MAX_NUM_REQS, MAX_MODEL_LEN],
        "device_bytes_saved": MAX_NUM_REQS * MAX_MODEL_LEN * 4,
        "chunks": {},
    }
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, 150_000, (MAX_NUM_REQS, MAX_MODEL_LEN), dtype=np.int32))
    tables = {
        place: rt.empty((MAX_NUM_REQS, MAX_MODEL_LEN), torch.int32, name=f"tokens.{place}", place=place)
        for place in ("uva", "device")
    }
    for table in tables.values():
        table.copy_(tokens)
    idx_mapping = rt.adopt(torch.from_numpy(rng.permutation(MAX_NUM_REQS)[:NUM_REQS].astype(np.int32)), "idx")
    prefill_len = rt.adopt(torch.full((MAX_NUM_REQS,), MAX_MODEL_LEN, dtype=torch.int32), "prefill_len")
    computed = rt.zeros(MAX_NUM_REQS, torch.int32, name="num_computed")
    following = rt.zeros((1, MAX_NUM_REQS), torch.int32, name="next_prefill_tokens")
    for chunk in (1, 16, 128):
        starts = rt.adopt(torch.arange(NUM_REQS + 1, dtype=torch.int32) * chunk, f"query_start_loc.{chunk}")
        input_ids = rt.zeros(NUM_REQS * chunk, torch.int32, name=f"input_ids.{chunk}")
        row: dict[str, Any] = {}
        for place, table in tables.items():
            args = (idx_mapping, starts, table, prefill_len, computed, input_ids, following, NUM_REQS)
            row[place] = device_us(rt, lambda args=args: prefill_inputs(rt, *args))
            wanted = tokens[idx_mapping.cpu().long(), :chunk].reshape(-1)
            assert torch.equal(input_ids.cpu(), wanted), "the kernel read something else than the table"
        figures["chunks"][str(chunk)] = row
    return figures


def bench_staged_writes(rt: Runtime) -> dict[str, Any]:
    """256 diffs of 4 values into a [1024, 1000] table: host time to stage and to apply, and device time."""
    figures: dict[str, Any] = {}
    for policy in ("pinned_copy", "uva_pool"):
        table = StagedWriteTensor(
            rt, POLICIES[policy](rt), f"staged.{policy}", (1024, 1000), torch.int32, expected_writes=NUM_REQS
        )

        def stage(table: StagedWriteTensor = table) -> None:
            for row in range(NUM_REQS):
                table.stage_write(row, 3, (1, 2, 3, 4))

        stage_us, apply_us = [], []
        for _ in range(60):
            start = time.perf_counter_ns()
            stage()
            middle = time.perf_counter_ns()
            table.apply_write()
            apply_us.append((time.perf_counter_ns() - middle) / 1e3)
            stage_us.append((middle - start) / 1e3)
            torch.cuda.synchronize()

        def both(table: StagedWriteTensor = table) -> None:
            stage()
            table.apply_write()

        rows, starts, lengths = (np.full(NUM_REQS, n, np.int32) for n in (0, 3, 4))
        rows[:] = np.arange(NUM_REQS)
        values = np.tile(np.arange(1, 5, dtype=np.int32), NUM_REQS)

        def stage_at_once(table: StagedWriteTensor = table) -> None:
            table.stage_writes(rows, starts, lengths, values)  # noqa: B023 (called in this turn)
            table.drop_pending()

        figures[policy] = {
            "stage_host_us": summary(stage_us[10:]),
            "stage_at_once_host_us": host_us(stage_at_once),
            "apply_host_us": summary(apply_us[10:]),
            "both_host_us": summary([one + other for one, other in zip(stage_us[10:], apply_us[10:], strict=True)]),
            "apply_device_us": device_us(rt, both),
        }
    return figures


def bench_preparation(rt: Runtime) -> dict[str, Any]:
    """256 decodes of 1,024 rows, block size 16: the uploads, and the launches with and without fusion, host and device
    time. What the launches read (counts and lengths under ``uva_pool``) lies in host memory, as in a step."""
    transfers = POLICIES["uva_pool"](rt)
    state = RequestState(rt, transfers, max_num_reqs=MAX_NUM_REQS, max_model_len=MAX_MODEL_LEN)
    buffers = InputBuffers(rt, transfers, max_num_reqs=MAX_NUM_REQS, max_num_batched_tokens=MAX_MODEL_LEN)
    tables = BlockTables(
        rt,
        transfers,
        block_sizes=(16,),
        max_num_reqs=MAX_NUM_REQS,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
    )
    rng = np.random.default_rng(0)
    ids = [f"r{i}" for i in range(NUM_REQS)]
    for i, req_id in enumerate(ids):
        length = int(rng.integers(100, 1000))
        blocks = list(range(1 + 64 * i, 1 + 64 * i + length // 16 + 1))
        request = RequestData(req_id, length, [1] * length, SamplingParams(), 0, False, (blocks,), length)
        tables.append_block_ids(state.add_request(request), (blocks,), overwrite=True)
    state.apply_staged_writes()
    tables.apply_staged_writes()
    rows = state.rows(ids)
    starts = np.minimum(np.arange(MAX_NUM_REQS + 1, dtype=np.int32), np.int32(NUM_REQS))
    ones, lengths = np.ones(NUM_REQS, np.int32), state.num_computed_tokens_np[rows] + 1
    host = HostBatch(ids, rows, ones, ones * 0, starts, lengths, NUM_REQS, NUM_REQS, False)
    batch = prepare_inputs(rt, state, buffers, host, 0)

    def separate() -> None:
        launch_inputs(rt, state, buffers, batch)
        tables.gather(batch.idx_mapping, NUM_REQS, NUM_REQS)
        tables.compute_slot_mappings(batch.idx_mapping, batch.query_start_loc, buffers.positions, NUM_REQS)

    def fused() -> None:
        prepare_decodes(rt, state, buffers, tables, batch, NUM_REQS)

    hosts = cycle([host, replace(host, rows=rows.copy())])  # as if somebody came or went at every step
    figures: dict[str, Any] = {
        "upload_host_us": host_us(lambda: upload_batch(buffers, host, 0)),
        "upload_for_fused_host_us": host_us(lambda: upload_batch(buffers, next(hosts), 0, fused=True)),
    }
    for name, launch in (("separate", separate), ("fused", fused)):
        figures[name] = {"host_us": host_us(launch), "device_us": device_us(rt, launch)}
    return figures


def host_us(launch: Callable[[], Any], repeats: int = 60) -> dict[str, float]:
    """Host microseconds of one ``launch``, on an idle device."""
    samples = []
    for _ in range(repeats + 10):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        launch()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    torch.cuda.synchronize()
    return summary(samples[10:])


def main(out: Annotated[Path, typer.Option(help="JSON file to write.")]) -> None:
    """Run all three on the GPU."""
    rt = make_runtime()
    if rt.device.type != "cuda":
        raise SystemExit("state_bench times a GPU; torch sees none here")
    with torch.inference_mode():
        parts = {"uva": bench_uva, "staged_writes": bench_staged_writes, "preparation": bench_preparation}
        write_result(out, "state_cuda", {name: part(rt) for name, part in parts.items()})
    typer.echo(out.read_text())


if __name__ == "__main__":
    typer.run(main)
