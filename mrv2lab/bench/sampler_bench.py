"""The sampler's kernels beside every peer that is here, in one run: ``mrv2lab bench sampler``.

A row is one way (``impl``) to do one ``op`` on ``rows`` x ``vocab`` logits of one ``dtype``:

* ``median_us`` and ``iqr_us``: by CUDA events, each launch queued behind a sleeping GPU so that launching costs nothing
  unless it takes longer than the work, with the L2 cache flushed in front of it; entrants take turns, a repeat each.
  An entrant that edits logits gets them back in between, untimed.
* ``peak_bytes``: what it keeps between calls, beside inputs, the requests' state and where its result goes, and what a
  call allocates at most, results that it returns included.
* ``fraction_of_copy_bandwidth``: the bytes that ``op`` must read whatever the method (``SamplerBatch.least_bytes``: the
  logits once; of penalties the counts), over the time, over the bandwidth of a copy measured in the same run (read and
  written bytes a second). 1 is a method that reads once and does nothing else.

Without a GPU the shapes are small, our kernels are their NumPy and torch definitions (``backend`` says ``spec``), the
clock is the host's, nothing is flushed, and the times say nothing about kernels: it shows that the parts work.

Peers: torch's own ways always; FlashInfer where ``flashinfer.sampling`` imports; vLLM where it is installed, or from
``--vllm-kernels DIR``, a folder with its kernel files (``vllm_kernels`` says which, and how to get them). Who is absent
is named with the reason under ``absent``; an entrant that fails, under ``failed``. The ops are measured one by one, and
what is there after each is given to ``keep``. The bar names the entrant at work, and ``slow_to_start`` whose first call
took long: FlashInfer's compiles its library with nvcc, for minutes, on a machine where nobody has used it yet.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm.auto import tqdm

from mrv2lab.bench.penalty_bench import penalties_by_length
from mrv2lab.bench.sampler_batch import OPS, Direct, Entrant, SamplerBatch, our_ways
from mrv2lab.bench.sampler_peers import Absent, flashinfer_ways, torch_ways
from mrv2lab.bench.vllm_kernels import installed_kernels, kernel_files, vllm_ways
from mrv2lab.runtime.create import resolve_device

KEYS = ("op", "rows", "vocab", "dtype", "impl", "median_us", "iqr_us", "peak_bytes", "fraction_of_copy_bandwidth")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PEERS = ("torch", "flashinfer", "vllm")
WARM_UP = 3
SLOW_S = 2.0
"""A first call that takes longer is named."""
CYCLES_A_US = 2000
"""The sleeping GPU counts clock cycles: about 2 GHz."""


def bench(
    device: str = "auto",
    *,
    rows: int | None = None,
    vocab: int | None = None,
    repeats: int | None = None,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    ops: tuple[str, ...] = OPS,
    vllm_kernels: str | Path | None = None,
    lengths: tuple[int, ...] | None = None,
    peers: tuple[str, ...] = PEERS,
    keep: Callable[[dict[str, Any]], None] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Everything, as a dictionary whose ``rows`` have :data:`KEYS`. None: 256 x 151,936 and 20 repeats on a GPU, 4 x
    4,096 and 5 on a CPU. ``lengths``: output lengths of the penalties' second table; () leaves it out. ``keep`` gets
    the dictionary after each op, its ``finished`` False, so whoever is interrupted has what was measured.

    Raises ``ValueError`` for sizes or names that there are not, ``DeviceMissing`` without the device."""
    where = resolve_device(device)
    on_gpu = where.type == "cuda"
    rows = rows if rows is not None else 256 if on_gpu else 4
    vocab = vocab if vocab is not None else 151_936 if on_gpu else 4096
    repeats = repeats if repeats is not None else 20 if on_gpu else 5
    _check(rows, vocab, repeats, {"dtype": (dtypes, tuple(DTYPES)), "op": (ops, OPS), "peer": (peers, PEERS)})
    clock = _Events(where) if on_gpu else _Host()
    copied = clock.copy_bytes_per_us()
    figures: dict[str, Any] = {
        "device": where.type,
        "backend": Direct(where).backend,
        "repeats": repeats,
        "copy_GB_per_s": copied / 1e3,
        "rows": [],
        "absent": {},
        "failed": {},
        "slow_to_start": {},
        "finished": False,
    }
    in_order = [op for op in OPS if op in ops]
    with torch.inference_mode(), tqdm(total=len(dtypes) * len(in_order), desc="sampler", disable=not progress) as bar:
        for name in dtypes:
            bar.set_postfix_str(f"{name}: makes the batch")
            batch = SamplerBatch(rows, vocab, DTYPES[name], where)
            with ExitStack() as stack:
                everybody = our_ways(batch) + _peers(batch, peers, vllm_kernels, figures["absent"], stack)
                for op in in_order:
                    entrants = [one for one in everybody if one.op == op]
                    figures["rows"] += _measure(entrants, batch, name, clock, repeats, copied, figures, bar)
                    figures["rows"].sort(key=lambda row: (OPS.index(row["op"]), row["dtype"]))
                    if keep is not None:
                        keep(figures)
                    bar.update()
            del everybody, entrants, batch
    if lengths != () and "penalties" in ops:
        figures["penalties_by_length"] = penalties_by_length(where.type, lengths=lengths, repeats=repeats)
    figures["finished"] = True
    return figures


def _check(rows: int, vocab: int, repeats: int, chosen: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]) -> None:
    for what, value, least in (("rows", rows, 1), ("vocab", vocab, 2), ("repeats", repeats, 2)):
        if value < least:
            raise ValueError(f"{what} must be at least {least}, got {value}")
    for what, (names, known) in chosen.items():
        for name in names:
            if name not in known:
                raise ValueError(f"{what} {name!r} is not one of {', '.join(known)}")


def _peers(
    batch: SamplerBatch, names: tuple[str, ...], folder: str | Path | None, absent: dict[str, str], stack: ExitStack
) -> list[Entrant]:
    """Everybody of ``names`` who is here; who is not goes into ``absent`` with the reason."""

    def vllm() -> list[Entrant]:
        kernels = installed_kernels() if folder is None else kernel_files(folder)
        return vllm_ways(batch, stack.enter_context(kernels))

    made: list[Entrant] = []
    every: dict[str, Callable[[], list[Entrant]]] = {
        "torch": lambda: torch_ways(batch),
        "flashinfer": lambda: flashinfer_ways(batch),
        "vllm": vllm,
    }
    for name in names:
        try:
            made += every[name]()
        except Absent as error:
            absent[name] = str(error)
    return made


def _measure(
    entrants: list[Entrant],
    batch: SamplerBatch,
    dtype: str,
    clock: Any,
    repeats: int,
    copied: float,
    figures: dict[str, Any],
    bar: Any,
) -> list[dict[str, Any]]:
    """A row an entrant. One that raises is named in the ``failed`` of ``figures`` and left out."""
    peaks: dict[int, int] = {}
    for i, one in enumerate(entrants):
        who = f"{one.op} {dtype} {one.impl}"
        bar.set_postfix_str(f"{who}: warms up")  # at once, so that the last line of a log names who never ended
        begin = time.perf_counter()
        try:
            for _ in range(WARM_UP):
                _restore(one)
                one.run()
            _restore(one)
            peaks[i] = one.owned_bytes() + clock.peak(one.run)
            clock.learn(i, one)
        except Exception as error:  # a peer's kernel may fail in any way, and the others still count
            figures["failed"][who] = f"{type(error).__name__}: {str(error)[:300]}"
        taken_s = time.perf_counter() - begin
        if taken_s > SLOW_S:
            figures["slow_to_start"][who] = round(taken_s, 1)
    samples: dict[int, list[float]] = {i: [] for i in peaks}
    bar.set_postfix_str(f"{entrants[0].op} {dtype}: timed" if entrants else "")
    for _ in range(repeats):
        for i in samples:
            clock.start(i, entrants[i])
        for i, us in clock.collect():
            samples[i].append(us)
    found = []
    for i, taken in samples.items():
        low, median, high = statistics.quantiles(taken, n=4)
        fraction = batch.least_bytes(entrants[i].op) / median / copied
        values = (
            entrants[i].op,
            batch.rows,
            batch.vocab,
            dtype,
            entrants[i].impl,
            median,
            high - low,
            peaks[i],
            fraction,
        )
        found.append(dict(zip(KEYS, values, strict=True)))
    return found


def _restore(one: Entrant) -> None:
    if one.before is not None:
        one.before()


class _Events:
    """Times on the GPU."""

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.zeros(max(2 * cache, 2**28), dtype=torch.uint8, device=device)
        self._events: list[tuple[int, Any, Any]] = []
        self._sleep_us: dict[int, float] = {}

    def copy_bytes_per_us(self) -> float:
        """Bytes read and written a microsecond by a copy of 1 GiB."""
        source = torch.zeros(2**30, dtype=torch.uint8, device=self._flush.device)
        target = torch.empty_like(source)
        one = Entrant("copy", "torch", lambda: target.copy_(source))
        one.run()
        self.learn(-1, one)
        for _ in range(10):
            self.start(-1, one)
        return 2 * source.nbytes / statistics.median(us for _, us in self.collect())

    def learn(self, i: int, one: Entrant) -> None:
        """How long the host takes to launch ``one``: so long the GPU has to sleep."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        _restore(one)
        one.run()
        self._sleep_us[i] = min(2e6 * (time.perf_counter() - begin), 20_000.0) + 100
        torch.cuda.synchronize()

    def start(self, i: int, one: Entrant) -> None:
        """Queue one timed run."""
        _restore(one)
        self._flush.zero_()
        torch.cuda._sleep(int(self._sleep_us[i] * CYCLES_A_US))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        one.run()
        end.record()
        self._events.append((i, begin, end))

    def collect(self) -> list[tuple[int, float]]:
        """Microseconds of what was queued."""
        torch.cuda.synchronize()
        taken = [(i, begin.elapsed_time(end) * 1e3) for i, begin, end in self._events]
        self._events.clear()
        return taken

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes that one run allocates at its peak."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = run()
        torch.cuda.synchronize()
        del kept
        return int(torch.cuda.max_memory_allocated() - before)


class _Host:
    """Times on the host, of work that is done when the call returns."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, float]] = []

    def copy_bytes_per_us(self) -> float:
        """Bytes read and written a microsecond by a copy of 64 MiB."""
        source, target = torch.zeros(2**26, dtype=torch.uint8), torch.empty(2**26, dtype=torch.uint8)
        one = Entrant("copy", "torch", lambda: target.copy_(source))
        for _ in range(5):
            self.start(-1, one)
        return 2 * source.nbytes / statistics.median(us for _, us in self.collect())

    def learn(self, i: int, one: Entrant) -> None:
        """Nothing to learn."""

    def start(self, i: int, one: Entrant) -> None:
        """One timed run."""
        _restore(one)
        begin = time.perf_counter_ns()
        one.run()
        self._taken.append((i, (time.perf_counter_ns() - begin) / 1e3))

    def collect(self) -> list[tuple[int, float]]:
        """Microseconds of the runs since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes that one run allocates."""
        return peak_on_cpu(run)


def peak_on_cpu(run: Callable[[], object]) -> int:
    """Bytes that ``run`` allocates at most, on a CPU: torch's peak and NumPy's, which need not come together."""
    with _TorchPeak():
        torch.zeros(1).add(1)  # the first use imports much, which would count
    tracemalloc.start()
    try:
        with _TorchPeak() as torch_peak:
            run()
        return int(torch_peak.peak) + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class _TorchPeak(TorchDispatchMode):
    """The most bytes that new storages held at a time. A storage counts until the tensor it came with is gone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._live: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and _storage(one) not in given | self._live:
                place, size = _storage(one), one.untyped_storage().nbytes()
                self._live.add(place)
                self._now += size
                self.peak = max(self.peak, self._now)
                weakref.finalize(one, self._gone, place, size)
        return made

    def _gone(self, place: int, size: int) -> None:
        self._live.discard(place)
        self._now -= size


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
