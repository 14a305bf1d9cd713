"""V1's graphs together: dispatcher, wrapper, statistics, and the capture of every key before the first request.

Capture is no path of its own: capturing is switched on, and the dummy run of each key's shape meets it in the wrapper.
Counterpart in vLLM: ``GPUModelRunner.capture_model`` in ``v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tqdm.auto import tqdm

from mrv2lab.attention import AttentionBackend
from mrv2lab.config import EngineConfig
from mrv2lab.graphs.descriptor import count
from mrv2lab.graphs.out_of_memory import FEWER, warn_dropped
from mrv2lab.protocol import Model
from mrv2lab.runner_v1.graph_dispatcher import Decision, GraphDispatcher, GraphKey, Mode
from mrv2lab.runner_v1.graph_stats import Cost, GraphStats, V1GraphReport, dropped_lines
from mrv2lab.runner_v1.graph_wrapper import ForwardContext, GraphWrapper
from mrv2lab.runner_v1.prepare import HostBatch
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.effects import GraphMemoryError

DummyRun = Callable[[Decision, bool], None]
"""Runs a batch of nobody at a key's padded shape; False = eagerly, to warm up."""


class V1Graphs:
    """Of one model."""

    def __init__(self, config: EngineConfig, rt: Runtime, model: Model, attention: AttentionBackend) -> None:
        self.rt = rt
        self.dispatcher = GraphDispatcher(
            config.graphs, config.scheduler, full_graphs=attention.full_graphs, backend=attention.name
        )
        self.context = ForwardContext()
        self.wrapper = GraphWrapper(rt, model, self.context)
        self.model: Model = self.wrapper if self.dispatcher.sizes else model
        """What the runner takes for its model."""
        self.stats = GraphStats()
        self.costs: dict[tuple[Mode, GraphKey], Cost] = {}
        self.remedy = FEWER
        """What a warning about graphs without memory advises."""

    def dispatch(self, host: HostBatch) -> Decision:
        """The step's graph, or none, and why. A phase of its own only where there are graphs."""
        longest = int(host.num_scheduled_tokens.max())
        shape = len(host.req_ids), host.num_tokens, longest
        if not self.dispatcher.sizes:
            return self.dispatcher.dispatch(*shape)
        with self.rt.observer.span("dispatch"):
            decision = self.dispatcher.dispatch(*shape)
            self.rt.observer.gauge("graph_tokens", decision.padded_tokens or 0)
            return decision

    # -- before the first request --------------------------------------------------------------------------------------

    def capture(self, dummy_run: DummyRun, *, progress: bool = True) -> V1GraphReport:
        """Capture every key, between steps. One that runs out of memory is dropped: its steps look for the next key, or
        are eager, and a warning says so. Waits for the device. ``progress`` draws a bar (tqdm)."""
        self.reset()
        todo = self.dispatcher.to_capture()
        with self._capturing(), tqdm(todo, desc="V1 graphs", disable=not progress) as bar:
            for mode, key in bar:
                bar.set_postfix_str(f"{mode} {key.num_tokens}")
                try:
                    self._capture_one(mode, key, dummy_run)
                except (GraphMemoryError, torch.OutOfMemoryError) as error:
                    self.dispatcher.drop(mode, key, f"out of memory: {str(error).splitlines()[0]}")
                    self.rt.trim()
        self.dispatcher.enable()
        self.stats.reset()
        dropped = self.dispatcher.dropped
        if dropped:
            lost = f"{len(dropped):,} of {count(len(todo), 'key')}"
            warn_dropped(lost, "look for the next one or run eagerly", dropped_lines(dropped), self.remedy)
        return self.report()

    def _capture_one(self, mode: Mode, key: GraphKey, dummy_run: DummyRun) -> None:
        start = time.perf_counter()
        decision = Decision(mode, key, "capture")
        dummy_run(decision, False)
        self.rt.synchronize()
        dummy_run(decision, True)
        self.rt.synchronize()
        graphs = self.wrapper.graphs(mode, key)
        self.costs[mode, key] = Cost(
            mode,
            key,
            graphs=len(graphs),
            launches=sum(graph.effects.launches for graph in graphs),
            nbytes=sum(graph.held for graph in graphs),
            seconds=time.perf_counter() - start,
        )

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """New keys are captured inside, and the garbage collector rests, since what it frees would break a capture."""
        self.rt.trim()
        was_on = gc.isenabled()
        gc.disable()
        self.wrapper.capturing = True
        try:
            yield
        except BaseException:
            self.reset()
            raise
        finally:
            self.wrapper.capturing = False
            if was_on:
                gc.enable()

    def report(self) -> V1GraphReport:
        """What the graphs cost, and what the steps so far did with them."""
        tallies = tuple(dataclasses.replace(tally) for tally in self.stats.tallies())  # steps to come count in others
        return V1GraphReport(
            tuple(self.costs.values()), dict(self.dispatcher.dropped), tallies, tuple(self.stats.recent)
        )

    def reset(self) -> None:
        """Drop every graph; steps are eager then."""
        self.wrapper.forget()
        self.costs.clear()
        self.dispatcher.enable(False)
