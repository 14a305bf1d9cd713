"""Captures every shape of a table explicitly, before the first request, and replays it. No capture hides in a forward.

    manager = CudaGraphManager(rt, table)
    manager.capture(prepare)                                    # largest first, piecewise before full
    decision = manager.dispatch(num_reqs, num_tokens, max_query_len)
    full:       write the padded inputs, then manager.replay(decision.descriptor)
    piecewise:  with manager.piecewise(decision.descriptor): model.forward(inputs)     # inputs padded, metadata not
    eager:      model.forward(inputs)

Counterpart in vLLM: ``CudaGraphManager`` of ``v1/worker/gpu/cudagraph_utils.py``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from tqdm.auto import tqdm

from mrv2lab.graphs.descriptor import BatchDescriptor, Decision, count
from mrv2lab.graphs.dispatch import DispatchTable
from mrv2lab.graphs.out_of_memory import FEWER, warn_dropped
from mrv2lab.graphs.pieces import PiecePlayer, PieceRecorder
from mrv2lab.graphs.report import Captured, CaptureReport, dropped_lines
from mrv2lab.graphs.stats import GraphStats
from mrv2lab.runtime.base import Graph, Runtime
from mrv2lab.runtime.effects import GraphMemoryError

Forward = Callable[[], object]
Prepare = Callable[[BatchDescriptor], Forward]
"""Writes dummy inputs of a descriptor's padded shape into the persistent buffers (slots -1, block rows null) and
returns the function that queues the decoder's forward over them: called once eagerly, as warm-up (on a CPU only
for the smallest shape of each kind), and once more, after a fresh ``prepare``, under capture. The function launches
segments (``rt.run``) and nothing else."""

NOT_CAPTURED = Decision(None, "graphs are not captured yet")


class CudaGraphManager:
    """See the module's docstring. One manager a decoder; all graphs share one memory pool, so they are replayed on one
    stream, in order. ``prefix`` keeps two managers' graphs apart in traces."""

    def __init__(self, rt: Runtime, table: DispatchTable, stats: GraphStats | None = None, *, prefix: str = "") -> None:
        self.rt = rt
        self.table = table
        self.stats = stats or GraphStats()
        self.captured: dict[BatchDescriptor, Captured] = {}
        """What there is, in the order of capture."""
        self.is_captured = False
        """Whether :meth:`capture` is done; before, every step is eager."""
        self.remedy = FEWER
        """What a warning about graphs without memory advises."""
        self._prefix = prefix
        self._graphs: dict[BatchDescriptor, list[Graph]] = {}
        self._players: dict[BatchDescriptor, PiecePlayer] = {}
        # Where nothing compiles, one eager run of a kind shows that it runs: a large one costs a CPU minutes.
        self._smallest = set({one.kind: one for one in table.candidates()}.values())

    # -- a step --------------------------------------------------------------------------------------------------------

    def dispatch(self, num_reqs: int, num_tokens: int, max_query_len: int) -> Decision:
        """See :meth:`DispatchTable.dispatch`; before the capture, eager. Note it with ``stats.note``."""
        if not self.is_captured and self.table.mode != "none":
            return NOT_CAPTURED
        return self.table.dispatch(num_reqs, num_tokens, max_query_len)

    def replay(self, descriptor: BatchDescriptor) -> None:
        """Queue a full graph on the current stream: one launch. Raises ``KeyError`` if it was not captured."""
        self._graphs[descriptor][0].replay()

    def piecewise(self, descriptor: BatchDescriptor) -> AbstractContextManager[None]:
        """Around a ``Decoder.forward`` over ``descriptor.num_tokens`` tokens: its segments between attentions are
        replayed, a graph each, and attention runs eagerly with the metadata it is given (vLLM #36626: that of the
        tokens there are, not of the padded ones). Raises ``KeyError`` if it was not captured."""
        return self._players[descriptor]

    # -- before the first step -----------------------------------------------------------------------------------------

    def capture(self, prepare: Prepare, *, progress: bool = True) -> CaptureReport:
        """Capture every candidate. A shape that runs out of memory is dropped together with the larger ones of its
        kind (what they held may hold the smaller ones): their steps take another kind's or run eagerly, and one
        warning says so.

        Waits for the device. ``progress`` draws a bar (tqdm)."""
        self.reset()
        with self._one_by_one(), tqdm(self.table.candidates(), desc="graphs", disable=not progress) as bar:
            for descriptor in bar:
                if descriptor in self.table.dropped:
                    continue
                bar.set_postfix_str(f"{descriptor.mode} {descriptor.num_tokens}")
                try:
                    self._capture_one(descriptor, prepare)
                except (GraphMemoryError, torch.OutOfMemoryError) as error:
                    self._drop(descriptor, str(error).splitlines()[0])
                    self.rt.trim()
        self.is_captured = True
        dropped = self.table.dropped
        if dropped:
            lost = f"{len(dropped):,} of {count(len(self.table.candidates()), 'shape')}"
            warn_dropped(lost, "take another one or run eagerly", dropped_lines(dropped), self.remedy)
        return self.report()

    @contextmanager
    def _one_by_one(self) -> Iterator[None]:
        """Nothing else frees memory during a capture: what is garbage goes before, and the collector rests."""
        self.rt.trim()
        was_on = gc.isenabled()
        gc.disable()
        try:
            with self.rt.active():
                yield
        except BaseException:
            self.reset()
            raise
        finally:
            if was_on:
                gc.enable()

    def _capture_one(self, descriptor: BatchDescriptor, prepare: Prepare) -> None:
        rt, start = self.rt, time.perf_counter()
        if rt.device.type == "cuda" or descriptor in self._smallest:
            prepare(descriptor)()
            rt.synchronize()
        forward = prepare(descriptor)
        rt.synchronize()
        name = f"{self._prefix}{descriptor.mode}.{descriptor.num_tokens}"
        if descriptor.mode == "piecewise":
            with PieceRecorder(rt, name) as recorder:
                forward()
            graphs = recorder.graphs
            self._players[descriptor] = PiecePlayer(rt, recorder.plan, len(graphs), str(descriptor))
        else:
            graph = rt.graph(f"{name}.{descriptor.num_reqs}" + ("" if descriptor.query_len else ".any"))
            with graph.capture():
                forward()
            graphs = [graph]
        self._graphs[descriptor] = graphs
        self.captured[descriptor] = Captured(
            descriptor,
            graphs=len(graphs),
            launches=sum(one.effects.launches for one in graphs),
            nbytes=sum(one.held for one in graphs),
            seconds=time.perf_counter() - start,
        )

    def _drop(self, failed: BatchDescriptor, why: str) -> None:
        """``failed`` and the larger ones of its kind are not to be had."""
        kind = failed.mode, failed.query_len
        for one in self.table.candidates():
            if (one.mode, one.query_len) == kind and one.num_tokens >= failed.num_tokens:
                self._release(one)
                room = f"given up when {count(failed.num_tokens, 'token')} ran out of memory"
                self.table.drop(one, f"out of memory: {why}" if one == failed else room)

    # -- for observers -------------------------------------------------------------------------------------------------

    def report(self) -> CaptureReport:
        """What the graphs cost."""
        return CaptureReport(tuple(self.captured.values()), self.table.dropped)

    def audit(self) -> list[str]:
        """What the graphs would read or write at an address that is no longer its buffer's, one line each; [] if all is
        well. Looks at the runtime's registry only, never at the device."""
        return [
            f"{graph.name}: {line}"
            for graphs in self._graphs.values()
            for graph in graphs
            for line in graph.effects.moved(self.rt.registry)
        ]

    def buffers(self, descriptor: BatchDescriptor) -> list[str]:
        """Names of the buffers that a shape's graphs read or write, in alphabetical order."""
        effects = [graph.effects for graph in self._graphs.get(descriptor, ())]
        return sorted({name for one in effects for name in (*one.reads.values(), *one.writes.values())})

    def rows(self) -> list[dict[str, object]]:
        """The table's rows (:meth:`DispatchTable.rows`) with what each shape's steps did so far: ``steps`` (hits),
        ``step_tokens`` (tokens there were), ``padding`` (tokens computed for nothing), and what its capture cost:
        ``graphs``, ``nbytes``, ``seconds`` (0 where there is none)."""
        hits = {descriptor: [0, 0, 0] for descriptor in self.table.candidates()}
        for tally in self.stats.tallies():
            if tally.decision.descriptor is not None:
                found = hits.setdefault(tally.decision.descriptor, [0, 0, 0])
                found[:] = found[0] + tally.steps, found[1] + tally.tokens, found[2] + tally.padding
        rows = []
        for descriptor, row in zip(self.table.candidates(), self.table.rows(), strict=True):
            cost = self.captured.get(descriptor)
            row |= dict(zip(("steps", "step_tokens", "padding"), hits[descriptor], strict=True))
            row |= {name: getattr(cost, name, 0) for name in ("graphs", "nbytes", "seconds")}
            rows.append(row)
        return rows

    # -- the end -------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop every graph, and its memory. The statistics stay."""
        for descriptor in list(self._graphs):
            self._release(descriptor)
        self.table.restore()
        self.is_captured = False

    def _release(self, descriptor: BatchDescriptor) -> None:
        for graph in self._graphs.pop(descriptor, ()):
            graph.reset()
        self._players.pop(descriptor, None)
        self.captured.pop(descriptor, None)
