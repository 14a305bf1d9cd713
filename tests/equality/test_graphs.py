"""Graphs against eager runs: bit for bit at the padded shape (exact class), and against transformers (near class),
which the unpadded eager run is near too. The padded tails hold NaN hidden states and random token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch

from mrv2lab.check.workloads import Case
from mrv2lab.config import GraphMode
from mrv2lab.engine.engine import Engine
from mrv2lab.runner.model_runner import ModelRunner
from tests.equality.compare import NearReport, compare_exact, compare_near, reference_logits
from tests.equality.harness import Trace, run_workload
from tests.equality.models import hf_model, source
from tests.equality.settings import label, make_case, settings
from tests.slow import mostly_slow

COUNT, QUICK, ON_GPU = 100, 4, 12
MODES: tuple[GraphMode, ...] = tuple(mode for mode in get_args(GraphMode) if mode != "none")
SIZES = ((1, 2, 4, 8, 16, 32), (3, 7, 16), (16,), (5,), (1, 2, 3, 4, 5, 6, 7, 8))
POISON = "test.poison"


class Poison:
    """In front of every forward: what lies behind the batch's own tokens becomes NaN in the decoder's buffers, a random
    id in ``input_ids`` and a random position in ``positions``."""

    def __init__(self, engine: Engine) -> None:
        self.runner: ModelRunner = engine.worker.runner
        self.decoder = engine.worker.decoder
        self.rt = engine.rt
        self.vocab, self.length = engine.config.model.vocab_size, engine.config.scheduler.max_model_len
        self.steps = 0
        self.rt.register(POISON, self._poison)
        self._run, self.runner.forward_pass.run = self.runner.forward_pass.run, self.run  # type: ignore[method-assign]

    def run(self, model: Any, decision: Any, inputs: Any) -> None:
        """As :meth:`ForwardPass.run`."""
        assert self.runner.batch is not None
        tokens, buffers = self.runner.batch.host.num_tokens, self.runner.buffers
        self.steps += 1
        tails = (buffers.input_ids[tokens:], buffers.positions[tokens:], self.decoder.hidden[tokens:])
        self.rt.run(POISON, self.steps, *tails, writes=tails)
        self._run(model, decision, inputs)

    def _poison(self, step: int, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> None:
        rng = np.random.default_rng(step)
        ids.copy_(torch.from_numpy(rng.integers(0, self.vocab, len(ids), np.int32)))
        positions.copy_(torch.from_numpy(rng.integers(0, self.length, len(positions))))
        hidden.fill_(float("nan"))


def run_case(
    case: Case,
    device: str = "cpu",
    *,
    replay: bool = True,
    look: Callable[[Engine], None] | None = None,
    **options: Any,
) -> Trace:
    """``replay`` False: eagerly at the padded shapes."""
    options = {"dtype": "float32", "progress": False} | case.options | case.transport | options
    with Engine(source(case.setting["model"]), device=device, **options) as engine:
        engine.worker.runner.forward_pass.replay = replay
        Poison(engine)
        trace = run_workload(engine, case.workload, aborts=case.aborts)
        if look is not None:
            look(engine)
    return trace


def graphs_of(index: int, case: Case) -> dict[str, Any]:
    """Mode and sizes of draw ``index``, as keywords of ``Engine``."""
    most = case.options["max_num_batched_tokens"]
    sizes = tuple(size for size in SIZES[index // 2 % len(SIZES)] if size <= most) or (most,)
    return {"cudagraph_mode": MODES[(index + index // 4) % len(MODES)], "cudagraph_capture_sizes": sizes}


class Totals:
    """What the whole file saw."""

    def __init__(self) -> None:
        self.near = NearReport()
        self.counts: Counter[str] = Counter()

    def look(self, engine: Engine) -> None:
        """Count the steps by kind, and that all are accounted for."""
        for tally in engine.worker.runner.graphs.stats.tallies():
            self.counts[tally.decision.mode] += tally.steps
            self.counts["padding"] += tally.padding


@pytest.fixture(scope="module")
def totals() -> Iterator[Totals]:
    made = Totals()
    yield made
    print(f"\n{made.near.rows} rows, {made.near.excused} excused, worst {made.near.worst:.2g}; {dict(made.counts)}")


def check(index: int, totals: Totals, device: str) -> None:
    reference = hf_model(settings()[index]["model"])
    case = make_case(index, vocab_size=reference.config.vocab_size, max_requests=20)
    graphs = graphs_of(index, case)
    trace = run_case(case, device, look=totals.look, **graphs)
    assert {"eager", "full", "piecewise"} & set(totals.counts)
    totals.near += compare_near(trace, reference_logits(reference, trace))
    other = {} if device == "cuda" else case.other_transport()
    compare_exact(trace, run_case(case, device, replay=False, **graphs, **other))


@pytest.mark.parametrize("index", mostly_slow(range(COUNT), QUICK), ids=label)
def test_workload(index: int, totals: Totals) -> None:
    check(index, totals, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(ON_GPU))
def test_workload_on_a_gpu(index: int, totals: Totals) -> None:
    """Torch's matrix products choose their kernel by the shape, so that the padded eager run has the graph's."""
    check(index, totals, "cuda")


def test_both_kinds_of_graph_and_eager_steps_ran(totals: Totals) -> None:
    if not totals.near.rows:
        pytest.skip("no workload ran before")
    totals.near.check()
    assert min(totals.counts[mode] for mode in ("full", "piecewise", "eager")) > 10
    assert totals.counts["padding"] > 20
