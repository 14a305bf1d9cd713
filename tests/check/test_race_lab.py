"""The lab: which policies give wrong tokens, always in the same steps; and on a GPU every time."""

from __future__ import annotations

from typing import Any

import pytest

from mrv2lab.check.race_lab import RaceReport, race
from mrv2lab.check.spin import Spin
from mrv2lab.config import TransferName
from mrv2lab.engine.engine import Engine
from mrv2lab.runner_v1.buffers import BUFFERS

UNSAFE: list[tuple[TransferName, int]] = [("unsafe", 2), ("uva_pool", 1)]
SAFE: list[tuple[TransferName, int]] = [("barrier", 2), ("pinned_copy", 2), ("uva_pool", 2)]
STAGED = {"request_state.diffs", "block_tables.diffs"}


def check_wrong(report: RaceReport, policy: str) -> None:
    assert report.corrupted_steps
    assert report.wrong_tokens
    assert set(report.buffers) >= STAGED
    assert ("idx_mapping" in report.buffers) == (policy == "unsafe")  # the pool's arrays go through temporaries
    assert {hazard.kind for hazard in report.hazards} == {"copy" if policy == "unsafe" else "uva"}
    assert {hazard.step for hazard in report.hazards} >= set(report.corrupted_steps)


def check_right(report: RaceReport) -> None:
    assert report.hazards == []
    assert report.corrupted_steps == []
    assert report.wrong_tokens == {}
    assert report.error is None


@pytest.mark.parametrize(("policy", "depth"), UNSAFE)
def test_unsafe_is_wrong_in_the_same_steps_each_time(policy: TransferName, depth: int) -> None:
    first, again = (race(policy, depth=depth, steps=12) for _ in range(2))
    check_wrong(first, policy)
    assert first.corrupted_steps == list(range(11))  # behind the last step nobody writes
    assert (first.corrupted_steps, first.wrong_tokens, first.hazards) == (
        again.corrupted_steps,
        again.wrong_tokens,
        again.hazards,
    )


def test_wrong_tokens_to_the_letter() -> None:
    # Every batch maps its rows with the next step's idx_mapping, so nobody is right.
    assert race("unsafe", steps=8).wrong_tokens == {0: 1, 1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 6}
    # Every prompt is staged twice, a step early and in time, but the first one's only by its successor's.
    assert race("uva_pool", depth=1, steps=8).wrong_tokens == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}


@pytest.mark.usefixtures("host_clock")
@pytest.mark.parametrize(("policy", "depth"), SAFE)
def test_safe_policies_are_right(policy: TransferName, depth: int) -> None:
    report = race(policy, depth=depth, steps=12)
    check_right(report)
    assert (report.wait_ns > 0) == (policy == "barrier")
    assert report.waits.loc["barrier", "waits"] == (11 if policy == "barrier" else 0)
    assert report.waits.loc["output", "waits"] == 11


@pytest.mark.parametrize(("policy", "depth"), [*UNSAFE, *SAFE])
def test_v1_beside_mrv2(policy: TransferName, depth: int) -> None:
    report = race(policy, depth=depth, steps=8, runner="v1")
    if (policy, depth) in SAFE:
        check_right(report)
    else:
        assert report.corrupted_steps == list(range(7))
        assert {hazard.kind for hazard in report.hazards} == {"copy" if policy == "unsafe" else "uva"}
        assert "block_table.0" in report.buffers
        assert report.wrong_tokens


def test_v1_with_a_forgotten_buffer() -> None:
    protected = tuple(name for name in BUFFERS if name != "input_ids")
    report = race("barrier", steps=8, runner="v1", protected=protected)
    assert report.buffers == ["input_ids"]
    assert report.wrong_tokens


@pytest.mark.parametrize(("policy", "depth"), SAFE)
def test_safe_policies_are_right_on_threads(policy: TransferName, depth: int) -> None:
    check_right(race(policy, depth=depth, steps=12, where="threaded"))


def test_a_report_prints_a_summary() -> None:
    report = race("unsafe", steps=8)
    lines = repr(report).splitlines()
    assert str(report) == repr(report)
    assert len(repr(report)) < 700
    assert lines[0] == "RaceReport: unsafe, mrv2 on deferred, 8 steps"
    assert lines[1] == "corrupted steps: 7 [0, 1, 2, 3, 4, 5, 6]"
    assert sum(report.by_buffer.values()) == len(report.hazards)
    assert [line for line in lines if "idx_mapping: 7" in line or "staged_writes.diffs: 7" in line]
    assert report.buffer_lines(3)[3:] == [f"and {len(report.buffers) - 3} more"]
    assert lines[-1] == "waits: output 7"
    assert "uva_pool, 1 slot," in repr(race("uva_pool", depth=1, steps=2))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="steps must lie between 1 and 200, got 0"):
        race("unsafe", steps=0)
    with pytest.raises(ValueError, match=r"stream must be one of .* got 'fast'"):
        race("unsafe", where="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pool_depth must be a positive integer, got 0"):
        race("uva_pool", depth=0)


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["mrv2", "v1"])
@pytest.mark.parametrize(("policy", "depth"), UNSAFE)
def test_unsafe_is_wrong_every_time_on_a_gpu(policy: TransferName, depth: int, runner: str) -> None:
    named = {"mrv2": STAGED, "v1": {"block_table.0", "num_computed_tokens"}}[runner]
    for _ in range(10):
        report = race(policy, depth=depth, where="cuda", runner=runner, steps=12)
        assert report.corrupted_steps
        assert report.wrong_tokens
        assert set(report.buffers) >= named
        assert {hazard.kind for hazard in report.hazards} == {"copy" if policy == "unsafe" else "uva"}
        assert {hazard.step for hazard in report.hazards} >= set(report.corrupted_steps)


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["mrv2", "v1"])
@pytest.mark.parametrize(("policy", "depth"), SAFE)
def test_safe_policies_are_right_every_time_on_a_gpu(policy: TransferName, depth: int, runner: str) -> None:
    for _ in range(10):
        check_right(race(policy, depth=depth, where="cuda", runner=runner, steps=12))


@pytest.mark.gpu
@pytest.mark.parametrize("milliseconds", [2.0, 20.0])
def test_a_spin_takes_its_time(milliseconds: float) -> None:
    import torch

    from mrv2lab.runtime.cuda import CudaRuntime

    rt = CudaRuntime()
    spin = Spin(rt, milliseconds)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(rt.main.cuda)
    spin.queue()
    end.record(rt.main.cuda)
    end.synchronize()
    assert 0.5 * milliseconds < begin.elapsed_time(end) < 2 * milliseconds


@pytest.mark.parametrize(
    "options",
    [{"device": "cpu"}, {"stream": "threaded"}, {"transfer": "barrier"}, {"pool_depth": 2}, {"max_num_reqs": 4}],
    ids=lambda options: next(iter(options)),
)
def test_what_the_experiment_sets_itself_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"the experiment sets {name} itself; leave it out"):
        race("barrier", steps=2, **options)


def test_the_safe_run_has_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Spy(Engine):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(options)
            super().__init__(*args, **options)

    monkeypatch.setattr("mrv2lab.check.race_lab.Engine", Spy)
    check_right(race("barrier", runner="v1", steps=3, reorder="decode_first", protected=BUFFERS))
    assert [options["reorder"] for options in made] == ["decode_first"] * 2
    assert ["protected" in options for options in made] == [True, False]
