"""V1 under graphs against eager runs at the padded shape and against MRV2 (exact class), and against transformers (near
class), which the unpadded eager run is near too. The padded tails hold NaN hidden states and random ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from mrv2lab.check import workloads
from mrv2lab.check.workloads import Case
from mrv2lab.config import GraphMode
from mrv2lab.engine.engine import Engine
from tests.equality.compare import NearReport, compare_exact, compare_near, reference_logits
from tests.equality.harness import Trace, run_workload
from tests.equality.models import hf_model, source
from tests.equality.settings import label, settings
from tests.runner_v1.graphs import Poison
from tests.runner_v1.runs import SAME_BATCHES, greedy_case, run
from tests.slow import mostly_slow

COUNT, QUICK, ON_GPU = 100, 3, 8
MODES: tuple[GraphMode, ...] = tuple(mode for mode in get_args(GraphMode) if mode != "none")
SIZES = ((1, 2, 4, 8, 16, 32), (3, 7, 16), (16,), (5,), (1, 2, 3, 4, 5, 6, 7, 8))


def run_case(case: Case, device: str, *, replay: bool, totals: Counter[str] | None = None, **options: Any) -> Trace:
    """``replay`` False: eagerly at the padded shapes."""
    options = {"dtype": "float32", "progress": False, "runner": "v1"} | case.options | case.transport | options
    with Engine(source(case.setting["model"]), device=device, **options) as engine:
        graphs = engine.worker.runner.graphs
        graphs.wrapper.replay, graphs.wrapper.debug = replay, True
        Poison(engine)
        trace = run_workload(engine, case.workload, aborts=case.aborts)
        if totals is not None:
            for tally in graphs.stats.tallies():
                totals[tally.decision.mode] += tally.steps
                totals["padding"] += tally.padding
    return trace


class Totals:
    """What the whole file saw."""

    def __init__(self) -> None:
        self.near = NearReport()
        self.counts: Counter[str] = Counter()


@pytest.fixture(scope="module")
def totals() -> Iterator[Totals]:
    made = Totals()
    yield made
    print(f"\n{made.near.rows} rows, {made.near.excused} excused, worst {made.near.worst:.2g}; {dict(made.counts)}")


def check(index: int, totals: Totals, device: str) -> None:
    setting = settings()[index] | {"sampling": "greedy"}  # V1 draws with generators, which the reference lacks
    reference = hf_model(setting["model"])
    case = workloads.make_case(index, setting, vocab_size=reference.config.vocab_size, max_requests=20)
    most = case.options["max_num_batched_tokens"]
    options: dict[str, Any] = {
        "cudagraph_mode": MODES[index // 2 % len(MODES)],
        "cudagraph_capture_sizes": tuple(size for size in SIZES[index % len(SIZES)] if size <= most) or (most,),
        "reorder": ("none", "decode_first", "mrv2")[index % 3],
    }
    trace = run_case(case, device, replay=True, totals=totals.counts, **options)
    totals.near += compare_near(trace, reference_logits(reference, trace))
    other = {} if device == "cuda" else case.other_transport()
    compare_exact(trace, run_case(case, device, replay=False, **options | other))


@pytest.mark.parametrize("index", mostly_slow(range(COUNT), QUICK), ids=label)
def test_graphs_against_eager_and_transformers(index: int, totals: Totals) -> None:
    check(index, totals, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(ON_GPU))
def test_on_a_gpu(index: int, totals: Totals) -> None:
    check(index, totals, "cuda")


@pytest.mark.parametrize("index", mostly_slow(range(40), 1))
def test_v1_equals_mrv2_where_both_pad_alike(index: int) -> None:
    """With a size of R, so that MRV2's largest graph of decodes is one of V1's."""
    case = greedy_case(index)
    reqs, most = case.options["max_num_reqs"], case.options["max_num_batched_tokens"]
    graphs = {
        "cudagraph_mode": MODES[index % len(MODES)],
        "cudagraph_capture_sizes": tuple(sorted({min(size, most) for size in (1, 2, 4, 8, reqs, 24)})),
        "progress": False,
    }
    mrv2 = run(case, **graphs)
    v1 = run(case, **SAME_BATCHES, **graphs, **case.other_transport())
    compare_exact(mrv2, v1)
    assert mrv2.batches == v1.batches


def test_every_mode_ran(totals: Totals) -> None:
    if not totals.near.rows:
        pytest.skip("no workload ran before")
    totals.near.check()
    assert min(totals.counts[mode] for mode in ("FULL", "PIECEWISE", "NONE")) > 10
    assert totals.counts["padding"] > 10
