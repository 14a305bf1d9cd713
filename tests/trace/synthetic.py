"""Traces as torch's profiler writes them of a vLLM-like runner, of any length and without a profiler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

BASE_NS = 1_767_189_312_000_000_000
PID = 4242
OUTPUT_TID = 4300
_OPS = ("aten::mm", "aten::add", "aten::rms_norm", "aten::silu_and_mul", "aten::index_select", "aten::copy_")
_FRAMES = ("_prepare_inputs", "_build_attention_metadata", "forward", "compute_logits", "sample", "_bookkeeping")
GRAPH_KERNELS = 40
"""Kernels that one graph launch owns; every fourth step replays a graph."""


def synthetic_kineto(events: int, seed: int = 0) -> bytes:
    """The whole text of a trace with exactly ``events`` rows; flow arrows and metadata come on top."""
    return b"".join(synthetic_chunks(events, seed))


def write_synthetic(path: Path, events: int, seed: int = 0) -> Path:
    """The same as a file, written piece by piece."""
    with path.open("wb") as file:
        file.writelines(synthetic_chunks(events, seed))
    return path


def synthetic_chunks(events: int, seed: int = 0) -> Iterator[bytes]:
    """The same in pieces of a step each."""
    yield (
        b'{\n  "schemaVersion": 1,\n  "deviceProperties": [{"id": 0, "name": "Synthetic", "numSms": 100}],\n'
        b'  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},\n'
        b'  "cuda_runtime_version": 12090,\n  "displayTimeUnit": "ms",\n  "traceEvents": [\n'
    )
    yield (
        f'  {{\n    "name": "process_name", "ph": "M", "ts": 0.000, "pid": {PID}, "tid": 0,\n'
        f'    "args": {{\n      "name": "python"\n    }}\n  }}'
    ).encode()
    rows = 0
    for step in _steps(random.Random(seed)):
        texts = []
        for is_row, text in step:
            if is_row and rows == events:
                break
            rows += is_row
            texts.append(",\n  " + text)
        yield "".join(texts).encode()
        if rows == events:
            break
    yield f'\n  ],\n  "traceName": "synthetic.json",\n  "baseTimeNanoseconds": {BASE_NS}\n}}\n'.encode()


def _row(category: str, name: str, pid: int, tid: int, start: int, duration: int, args: str) -> tuple[bool, str]:
    return True, (
        f'{{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
        f'    "ts": {start // 1000}.{start % 1000:03}, "dur": {duration // 1000}.{duration % 1000:03},\n'
        f'    "args": {{\n      {args}\n    }}\n  }}'
    )


def _flow(kind: str, number: int, pid: int, tid: int, start: int) -> tuple[bool, str]:
    end = ', "bp": "e"' if kind == "f" else ""
    time = f"{start // 1000}.{start % 1000:03}"
    return False, (
        f'{{\n    "ph": "{kind}", "id": {number}, "pid": {pid}, "tid": {tid}, "ts": {time},\n'
        f'    "cat": "ac2g", "name": "ac2g"{end}\n  }}'
    )


def _steps(chance: random.Random) -> Iterator[Iterator[tuple[bool, str]]]:
    """One iterator of events a step; clocks of host and device go on from step to step."""
    ids = count(1)
    python_ids = count(1)
    host, device = 1_365_627_862_757_064, 1_365_627_862_800_000

    def step(number: int) -> Iterator[tuple[bool, str]]:
        nonlocal host, device
        begin, device_begin = host, max(device, host + 5_000)
        device = device_begin
        root = next(python_ids)
        for place, frame in enumerate(_FRAMES):
            frame_begin = host
            host += 2_000
            for _ in range(chance.randrange(6, 12)):
                op = chance.choice(_OPS)
                op_begin = host
                number_of = next(ids)
                host += chance.randrange(1_500, 4_000)
                call = host
                graph = number % 4 == 3 and frame == "forward"
                name = "cudaGraphLaunch" if graph else "cudaLaunchKernel"
                host += chance.randrange(2_000, 9_000)
                yield _row(
                    "cuda_runtime", name, PID, PID, call, host - call, f'"cbid": 211, "correlation": {number_of}'
                )
                yield _flow("s", number_of, PID, PID, call)
                device = max(device, host)
                for node in range(GRAPH_KERNELS if graph else 1):
                    length = chance.randrange(900, 30_000)
                    yield _row(
                        "kernel",
                        f"void synthetic_kernel<{chance.randrange(60)}, float>(int, float*)",
                        0,
                        7,
                        device,
                        length,
                        f'"External id": {number_of}, "queued": 0, "device": 0, "context": 1, "stream": 7, '
                        f'"correlation": {number_of}, "registers per thread": 32, "shared memory": 0, '
                        f'"grid": [{node + 1}, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 31',
                    )
                    device += length + chance.randrange(0, 1_500)
                yield _flow("f", number_of, 0, 7, device)
                host += chance.randrange(500, 2_000)
                yield _row(
                    "cpu_op",
                    op,
                    PID,
                    PID,
                    op_begin,
                    host - op_begin,
                    f'"External id": {number_of}, "Record function id": 0, "Input type": ["float", "Scalar"], '
                    f'"Input Dims": [[{chance.randrange(1, 512)}, 1024], []], "Ev Idx": {number_of}',
                )
                host += chance.randrange(200, 1_000)
                if graph:
                    break
            yield _row(
                "python_function",
                f"vllm/v1/worker/gpu_model_runner.py({100 + place}): {frame}",
                PID,
                PID,
                frame_begin,
                host - frame_begin,
                f'"Python parent id": {root}, "Python id": {next(python_ids)}, "Ev Idx": {number}',
            )
        number_of = next(ids)
        call = host
        host += 4_000
        yield _row("cuda_runtime", "cudaMemcpyAsync", PID, PID, call, 4_000, f'"cbid": 41, "correlation": {number_of}')
        copy = max(device, host)
        yield _row(
            "gpu_memcpy",
            "Memcpy DtoH (Device -> Pinned)",
            0,
            20,
            copy,
            1_600,
            f'"device": 0, "context": 1, "stream": 20, "correlation": {number_of}, "bytes": 2048, '
            '"memory bandwidth (GB/s)": 1.28',
        )
        number_of = next(ids)
        end = max(copy + 3_000, host + 1_000)
        wait = f'"cbid": 270, "correlation": {number_of}'
        yield _row("cuda_runtime", "cudaEventSynchronize", PID, OUTPUT_TID, host, end - host, wait)
        yield (
            True,
            f'{{"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": {PID}, "tid": {PID}, '
            f'"ts": {host // 1000}.{host % 1000:03}, "args": {{"Bytes": 512, "Device Id": 0}}}}',
        )
        label = f"execute_{number}_context_0(0)_generation_32(32)"
        yield _row("user_annotation", label, PID, PID, begin, host - begin, f'"External id": {number_of}')
        yield _row("gpu_user_annotation", label, 0, 7, device_begin - 1, device - device_begin + 2, '"External id": 1')
        host += chance.randrange(5_000, 50_000)

    for number in count():
        yield step(number)
