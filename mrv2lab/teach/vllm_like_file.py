"""A made-up file for the lesson on foreign traces: names and structure as torch.profiler writes them of vLLM's V1.

Every number in it, line numbers included, is invented by a seed, and kernel names are shortened; no vLLM and no GPU was
there. What it keeps of the real ones: decode steps whose kernels belong to one graph launch and run milliseconds after
the host has gone on, an eager prefill in which the host is the slow one, the input barrier at both ends (once without
the runtime's call), the profiler's own buffer request inside a copy, programmatic launches that overlap on one stream,
device work whose launch came before the file begins, and a bandwidth of ``inf``, which is no JSON.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mrv2lab.trace.sync_kinds import BARRIER

NAME = "synthetic_like_vllm_v1.json.gz"
DECODE_STEPS = 4
GRAPH_KERNELS = 310
LAYERS = 28
MARK = "mrv2lab_synthetic"
"""Top-level key by which the file says what it is."""

_PID, _STREAM = 4711, 7
_BASE_NS = 1_767_189_312_000_000_000
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_NODES = (
    "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>",
    "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>",
    "reshape_and_cache_flash_kernel",
    "flash_fwd_splitkv_kernel",
    "triton_poi_fused_mul_silu_slice_0",
)
_OPS = ("aten::mm", "_C::fused_add_rms_norm", "_C::rotary_embedding", "vllm::unified_attention", "_C::silu_and_mul")


def write_like_vllm(folder: str | Path, seed: int = 7) -> Path:
    """Write the file into ``folder`` and return its path; the same seed gives the same bytes."""
    path = Path(folder) / NAME
    with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
        packed.write(text_like_vllm(seed))
    return path


def text_like_vllm(seed: int = 7) -> bytes:
    """The file's text, ``inf`` included."""
    made = _Made(random.Random(seed))
    made.work_before_the_file()
    for _ in range(DECODE_STEPS):
        made.decode()
    made.prefill()
    whole = {
        "schemaVersion": 1,
        MARK: {"seed": seed, "note": "invented by mrv2lab; no vLLM and no GPU was there"},
        "deviceProperties": [{"id": 0, "name": "invented GPU", "numSms": 100}],
        "cuda_runtime_version": 12090,
        "with_stack": 1,
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": _BASE_NS,
        "traceEvents": made.events,
        "traceName": NAME,
    }
    return json.dumps(whole).replace("Infinity", "inf").encode()  # as Kineto wrote it (pytorch/kineto #105)


class _Made:
    """The host's clock ``now``, the stream's ``free``, and what was written down; ns."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.events: list[dict[str, Any]] = []
        self.now = 1_365_627_862_757_064
        self.free = self.now - 310_000  # what the device works at began before the file's first step
        self._correlation = 1000
        self._line = {name: chance.randrange(120, 4000) for name in ("enter", "leave")}

    # -- events

    def us(self, low: float, high: float) -> int:
        """A length between so many microseconds, in ns."""
        return self.chance.randrange(int(low * 1000), int(high * 1000))

    def work(self, low: float, high: float) -> None:
        """The host is busy for a while."""
        self.now += self.us(low, high)

    def put(
        self, category: str, name: str, start: int, end: int, pid: int = _PID, tid: int = _PID, **args: Any
    ) -> None:
        """One event."""
        times = {"ts": start / 1000, "dur": (end - start) / 1000}
        event: dict[str, Any] = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times}
        self.events.append(event | ({"args": args} if args else {}))

    @contextmanager
    def range(self, name: str, category: str = "python_function") -> Iterator[None]:
        """A frame or a named range around what happens in it."""
        start = self.now
        self.work(0.4, 1.2)
        yield
        self.work(0.4, 1.2)
        self.put(category, name, start, self.now)

    def frame(self, file: str, function: str, line: int | None = None) -> Any:
        """A Python frame; its line is made from its name unless it is given."""
        line = 100 + sum(map(ord, function)) % 2900 if line is None else line
        return self.range(f"{file}({line}): {function}")

    def call(self, api: str, low: float, high: float) -> int:
        """A call of the runtime that launches nothing; returns its correlation id."""
        start = self.now
        self.work(low, high)
        self._correlation += 1
        driver = "cuda_driver" if api.startswith("cuL") else "cuda_runtime"
        self.put(driver, api, start, self.now, cbid=1, correlation=self._correlation)
        return self._correlation

    def device(self, category: str, name: str, length: int, correlation: int, early: int = 0, **args: Any) -> None:
        """A piece of work on the stream: behind what is there, or ``early`` before that has ended."""
        start = max(self.free - early, self.now + 2_000)
        self.free = max(self.free, start + length)
        ids = {"device": 0, "context": 1, "stream": _STREAM, "correlation": correlation}
        self.put(category, name, start, start + length, 0, _STREAM, **ids, **args)

    def launch(self, api: str, kernel: str, low: float, high: float, early: int = 0) -> None:
        """A call and its one kernel."""
        self.device("kernel", kernel, self.us(low, high), self.call(api, 4, 9), early, grid=[8, 1, 1])

    def copy(self, nbytes: int, memory: str = "Pinned", **args: Any) -> None:
        """A copy to the device, as an operator."""
        with self.range("aten::copy_", "cpu_op"):
            correlation = self.call("cudaMemcpyAsync", 4, 8)
            self.device(
                "gpu_memcpy", f"Memcpy HtoD ({memory} -> Device)", self.us(1, 2), correlation, bytes=nbytes, **args
            )

    def copy_to_gpu(self, nbytes: int, overhead_us: int = 0) -> None:
        """vLLM's copy of one of its buffers; the profiler may ask for memory in the middle of it."""
        with self.frame("vllm/v1/utils.py", "copy_to_gpu"):
            self.work(3, 6)
            if overhead_us:
                start = self.now
                self.work(overhead_us, overhead_us + 100)
                self.put("overhead", "Activity Buffer Request", start, self.now, -1, 0)
            self.copy(nbytes)

    # -- steps

    def work_before_the_file(self) -> None:
        """Two thirds of the graph of a step that was launched before the profiler was."""
        for node in range(2 * GRAPH_KERNELS // 3):
            length = self.us(8, 22)
            ids = {"device": 0, "context": 1, "stream": _STREAM, "correlation": 77}
            self.put("kernel", _NODES[node % len(_NODES)], self.free, self.free + length, 0, _STREAM, **ids)
            self.free += length + self.us(0.6, 1.2)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step's range; behind it the engine waits, outside the profiled thread's frames, for the step before."""
        start, done = self.now, self.free
        with self.frame("torch/utils/_contextlib.py", "decorate_context"), self.frame(_RUNNER, "execute_model"):
            yield
        self.put("user_annotation", name, start, self.now)
        self.now = max(self.now, done) + self.us(60, 140)

    @contextmanager
    def barrier(self, api_us: tuple[float, float] | None, frame_us: float) -> Iterator[None]:
        """The input barrier: a wait at its beginning, an event recorded at its end. ``api_us``: how long the runtime's
        call took; None: it was not recorded."""
        with (
            self.frame("contextlib.py", "__enter__"),
            self.range("<built-in function next>"),
            self.frame(_RUNNER, BARRIER, self._line["enter"]),
            self.range("<built-in method synchronize of torch.Event object at 0x7f3ab849d0f0>"),
        ):
            if api_us:
                self.call("cudaEventSynchronize", *api_us)
            self.work(frame_us, frame_us * 1.2)
        yield
        with (
            self.frame("contextlib.py", "__exit__"),
            self.range("<built-in function next>"),
            self.frame(_RUNNER, BARRIER, self._line["leave"]),
            self.range("<built-in method record of torch.Event object at 0x7f3ab849d0f0>"),
        ):
            self.call("cudaEventRecord", 1, 2)

    def prepare(self, overhead_us: int = 0) -> None:
        """What lies inside the barrier."""
        with self.frame(_RUNNER, "_update_states"):
            self.work(150, 260)
        with self.frame(_RUNNER, "_prepare_inputs"):
            with self.frame("vllm/v1/worker/block_table.py", "commit_block_table"):
                self.copy_to_gpu(9_216, overhead_us)
            self.work(60, 100)
            with self.frame("vllm/v1/worker/block_table.py", "commit_slot_mapping"):
                self.copy_to_gpu(256)
            for nbytes in (132, 128):
                self.work(8, 20)
                self.copy_to_gpu(nbytes)
            with self.frame(_RUNNER, "_prepare_input_ids"):
                self.work(100, 180)
                self.copy_to_gpu(256)

    def logits(self) -> None:
        """Behind the model."""
        with self.frame(_RUNNER, "compute_logits"), self.range("nn.Module: LogitsProcessor_0"):
            self.work(30, 60)
            self.launch("cudaLaunchKernel", "void at::native::index_select_kernel", 2, 3)
            self.work(20, 40)
            self.launch("cudaLaunchKernel", "nvjet_tst_192x8_64x8_2x1_v_bz_TNN", 110, 140)

    def decode(self) -> None:
        """32 requests, a token each: one graph launch."""
        with self.step("execute_context_0(0)_generation_32(32)"):
            with self.barrier((1.8, 2.6), self.chance.uniform(90, 190)):
                self.prepare()
            with self.frame(_RUNNER, "_build_attention_metadata"):
                self.work(110, 170)
            with (
                self.frame(_RUNNER, "_model_forward"),
                self.frame("vllm/compilation/cuda_graph.py", "__call__"),
                self.frame("torch/cuda/graphs.py", "replay"),
            ):
                correlation = self.call("cudaGraphLaunch", 380, 520)
                for node in range(GRAPH_KERNELS):
                    self.device("kernel", _NODES[node % len(_NODES)], self.us(8, 22), correlation)
                    self.free += self.us(0.6, 1.2)
            self.logits()

    def prefill(self) -> None:
        """One request of 888 tokens, launched kernel by kernel."""
        with self.step("execute_context_1(888)_generation_0(0)"):
            with self.barrier(None, 2.5):
                self.prepare(overhead_us=1_450)
            with self.frame(_RUNNER, "_build_attention_metadata"):
                self.work(110, 170)
                with self.frame("vllm/v1/attention/backends/flashinfer.py", "build"), self.range("aten::to", "cpu_op"):
                    # Small and pageable: staged by the runtime, which returns before the device has come to it.
                    self.copy(64, "Pageable", **{"memory bandwidth (GB/s)": float("inf")})
            with self.frame(_RUNNER, "_model_forward"), self.range("nn.Module: Qwen3ForCausalLM_0"):
                for layer in range(LAYERS):
                    with self.range(f"nn.Module: Qwen3DecoderLayer_{layer}"):
                        self.layer()
            self.logits()

    def layer(self) -> None:
        """One layer: the host takes longer to launch a kernel than the device to run it. Two of its kernels are
        launched so that the second may begin before the first has ended."""
        for place, op in enumerate((*_OPS, *_OPS)):
            with self.range(op, "cpu_op"):
                self.work(35, 70)
                self.launch("cudaLaunchKernel", _NODES[place % len(_NODES)], 6, 14)
        with self.range("vllm::moe_forward", "cpu_op"):
            self.launch("cudaLaunchKernel", "bmm_gate_up", 45, 60)
            self.launch("cudaLaunchKernelExC", "bmm_down", 18, 25, early=self.us(0.4, 2.0))
