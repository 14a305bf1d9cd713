"""The heartbeat: many workloads, each against Hugging Face (near), and against another stream and policy (exact)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from mrv2lab.check.workloads import Case, pairs
from tests.equality.compare import NearReport, compare_exact, compare_near, reference_logits
from tests.equality.models import hf_model, source
from tests.equality.settings import COUNT, FACTORS, QUICK, all_pairs, label, make_case, run_case, settings

CASES = [
    pytest.param(index, id=label(index), marks=[] if index < QUICK else [pytest.mark.slow]) for index in range(COUNT)
]


class Totals:
    """What the whole file saw."""

    def __init__(self) -> None:
        self.near = NearReport()
        self.counts: Counter[str] = Counter()
        self.sync_async = 0


@pytest.fixture(scope="module")
def totals() -> Iterator[Totals]:
    made = Totals()
    yield made
    print(f"\n{made.near.rows} rows, {made.near.excused} excused, worst {made.near.worst:.2g}; {dict(made.counts)}")


def same_batches_expected(case: Case) -> bool:
    """Sync and async form the same batches: one burst, no early end, nobody waiting."""
    wanted = {"arrivals": "burst", "stop": "length", "pool": "roomy", "aborts": "no", "chunk": "none"}
    return all(case.setting[name] == value for name, value in wanted.items())


@pytest.mark.parametrize("index", CASES)
def test_workload(index: int, totals: Totals) -> None:
    setting = settings()[index]
    model = source(setting["model"])
    reference = hf_model(setting["model"])
    case = make_case(index, vocab_size=reference.config.vocab_size, max_requests=24 if model == "tiny" else 64)
    trace = run_case(case)
    report = compare_near(trace, reference_logits(reference, trace))
    totals.near += report
    totals.counts += Counter(
        preemptions=trace.stats.num_preemptions,
        hits=trace.stats.prefix_hit_tokens,
        wasted=trace.num_wasted,
        aborted=sum(output.finish_reason == "abort" for output in trace.outputs.values()),
        stopped=sum(output.finish_reason == "stop" for output in trace.outputs.values()),
    )
    if setting["pool"] == "storm":
        assert trace.stats.num_preemptions
    if setting["prefix"] == "shared":
        assert trace.stats.prefix_hit_tokens
    compare_exact(trace, run_case(case, **case.other_transport()))
    if same_batches_expected(case):
        other = run_case(case, async_scheduling=not case.options["async_scheduling"])
        compare_exact(trace, other)
        totals.counts["sync = async"] += 1


def test_excused(totals: Totals) -> None:
    """At most 0.5 % over all the workloads of this file that ran."""
    if not totals.near.rows:
        pytest.skip("no workload ran before")
    totals.near.check()


def test_every_pair_of_settings_occurs() -> None:
    covered = set().union(*(pairs(setting) for setting in settings()))
    assert covered == all_pairs()


def test_the_quick_ones_hold_every_value() -> None:
    quick = settings()[:QUICK]
    for name, values in FACTORS.items():
        assert {setting[name] for setting in quick} == set(values)
    share = len(set().union(*(pairs(setting) for setting in quick))) / len(all_pairs())
    assert share > 0.8
