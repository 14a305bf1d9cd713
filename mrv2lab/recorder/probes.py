"""The only work that a recorder adds to the device: checksums of the integer state, and top-k logits where asked for.

Both are queued behind the step's own work and copied to pinned memory; they are read once a later step's output has
been waited for anyway. ``busy`` is true while they are queued, so that their marks say whose they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from mrv2lab.ops.checksum import checksum
from mrv2lab.recording.schema import TopK

if TYPE_CHECKING:
    from mrv2lab.engine.engine import Engine
    from mrv2lab.runtime.base import Runtime

TOP_K = "recorder.top_k"


class Probes:
    """Checksums every ``check_every`` steps (0 = never) and ``top_k`` logits a row (0 = none)."""

    def __init__(self, engine: Engine, check_every: int, top_k: int) -> None:
        self.busy = False
        self._engine = engine
        self._rt = engine.rt
        depth = max(engine.config.scheduler.max_concurrent_steps, 1) + 1
        self.checks = Checksums(engine, depth) if check_every else None
        self.top = TopKProbe(engine, depth, top_k) if top_k else None
        self._every = check_every

    def prime(self) -> None:
        """Compile what will be launched, before the recording begins."""
        with self._own(), torch.inference_mode(), self._rt.active():
            if self.checks is not None:
                self.checks.launch_early()
                self.checks.launch(-1)
        self._rt.synchronize()
        if self.checks is not None:
            self.checks.pending.clear()

    def after_logits(self, number: int) -> None:
        """The logits of step ``number`` are queued."""
        logits = self._engine.worker.runner.logits
        if self.top is not None and logits is not None:
            with self._own():
                self.top.launch(number, logits)

    def before_output(self, number: int) -> None:
        """Step ``number`` is queued up to its sampling."""
        if self.checks is not None and (number + 1) % self._every == 0:
            with self._own():
                self.checks.launch_early()

    def after_step(self, number: int) -> None:
        """All of step ``number`` is queued."""
        if self.checks is not None and (number + 1) % self._every == 0:
            with self._own():
                self.checks.launch(number)

    def drop(self, number: int) -> None:
        """The engine was reset: forget what is pending of steps from ``number`` on, and every checksum, since those are
        copied behind their step's output and may have been dropped though it was waited for."""
        self.busy = False  # an interrupt may have left it
        if self.checks is not None:
            self.checks.pending.clear()
        if self.top is not None:
            self.top.pending = {one: entry for one, entry in self.top.pending.items() if one < number}

    @contextmanager
    def _own(self) -> Iterator[None]:
        self.busy = True
        try:
            yield
        finally:
            self.busy = False


class Checksums:
    """One checksum a table; see ``ops/checksum.py``. 1-D tables count as one row.

    Published tables are read before the step's output event, all others behind the step. A slot of a UVA pool may be
    rewritten as soon as that event has been waited for, so whoever reads it later reads a later step's values.
    """

    def __init__(self, engine: Engine, depth: int) -> None:
        rt = engine.rt
        self._rt = rt
        self._runner = engine.worker.runner
        state, blocks = self._runner.req_states, self._runner.block_tables
        self._slices: dict[str, slice] = {}
        self._full: dict[str, torch.Tensor] = {}
        """name -> lengths [rows], where every cell counts"""
        rows = 0
        for name, table in self._runner.tables().items():
            by_row = name == "all_token_ids" or name.startswith(("block_table.", "input_block_table."))
            count = table.shape[0] if by_row else 1
            self._slices[name] = slice(rows, rows + count)
            rows += count
            if not by_row or name.startswith("input_"):
                cells = table.shape[1] if by_row else table.numel()
                lengths = torch.full((count,), cells, dtype=torch.int32)
                self._full[name] = rt.adopt(lengths, f"recorder.lengths.{name}")
        self._state, self._blocks = state, blocks
        self._early = {name for name in self._slices if name.startswith("block_table.")} | set(
            self._runner.host_tables()
        )
        self._out = rt.empty(rows, torch.int64, name="recorder.checksums")
        self._host = [
            rt.empty(rows, torch.int64, name=f"recorder.checksums.{i}.host", place="pinned") for i in range(depth)
        ]
        self._next = 0
        self.pending: deque[tuple[int, torch.Tensor]] = deque()

    def launch_early(self) -> None:
        """Queue the checksums of the published tables, and of those whose lengths are published."""
        self._launch(self._early)

    def launch(self, number: int) -> None:
        """Queue the checksums of all other tables, and the copy of all."""
        rt = self._rt
        self._launch(self._slices.keys() - self._early)
        host = self._host[self._next % len(self._host)]
        self._next += 1
        rt.d2h(host, self._out)
        self.pending.append((number, host))

    def _launch(self, names: Set[str]) -> None:
        for name, table in self._runner.tables().items():
            if name in names:
                view = table.view(torch.int32) if table.dtype == torch.float32 else table
                rows = self._slices[name]
                if rows.stop - rows.start == 1 and name in self._full:
                    view = view.view(1, -1)
                checksum(self._rt, view, self._lengths(name), self._out[rows])

    def _lengths(self, name: str) -> torch.Tensor:
        if name in self._full:
            return self._full[name]
        if name == "all_token_ids":
            lengths: torch.Tensor = self._state.total_len.gpu
            return lengths
        lengths = self._blocks.num_blocks.gpu[int(name.rpartition(".")[2])]
        return lengths

    def collect(self, before: int | None) -> Iterator[tuple[int, dict[str, int]]]:
        """(step's number, table -> checksum) of steps before ``before`` (None: all), whose copies are done by now."""
        while self.pending and (before is None or self.pending[0][0] < before):
            number, host = self.pending.popleft()
            sums = host.numpy().view(np.uint64)
            yield number, {name: int(sums[rows].sum(dtype=np.uint64)) for name, rows in self._slices.items()}


class TopKProbe:
    """The greatest logits of each row, with their tokens."""

    def __init__(self, engine: Engine, depth: int, k: int) -> None:
        rt = engine.rt
        scheduler = engine.config.scheduler
        n = min(scheduler.max_num_reqs, scheduler.max_num_batched_tokens)
        self._rt: Runtime = rt
        self._values = rt.empty((n, k), torch.float32, name="recorder.top_k.logits")
        self._ids = rt.empty((n, k), torch.int64, name="recorder.top_k.token_ids")
        self._host = [
            (
                rt.empty((n, k), torch.float32, name=f"recorder.top_k.logits.{i}.host", place="pinned"),
                rt.empty((n, k), torch.int64, name=f"recorder.top_k.token_ids.{i}.host", place="pinned"),
            )
            for i in range(depth)
        ]
        self._next = 0
        self.pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        try:
            rt.function(TOP_K)
        except KeyError:
            rt.register(TOP_K, _top_k)

    def launch(self, number: int, logits: torch.Tensor) -> None:
        """Queue the top-k of ``logits`` [n, V] and its copy."""
        rt, n = self._rt, logits.shape[0]
        values, ids = self._values[:n], self._ids[:n]
        rt.run(TOP_K, values, ids, logits, reads=(logits,), writes=(values, ids))
        host_values, host_ids = self._host[self._next % len(self._host)]
        self._next += 1
        rt.d2h(host_values[:n], values)
        rt.d2h(host_ids[:n], ids)
        self.pending[number] = host_values[:n], host_ids[:n]

    def collect(self, number: int) -> TopK | None:
        """What step ``number`` left, once its output has been waited for."""
        found = self.pending.pop(number, None)
        if found is None:
            return None
        values, ids = found
        return TopK(ids.numpy().astype(np.int32), values.numpy().copy())


def _top_k(values: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor) -> None:
    found = torch.topk(logits.float(), values.shape[1], dim=1)
    values.copy_(found.values)
    ids.copy_(found.indices)
