"""Rewind is exact: the rebuilt state of any step is the device's of that step, bit for bit, whatever the way there."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mrv2lab.recording.replay import Replay, StateUnknown, hash_tables
from mrv2lab.recording.replay_program import OpCall
from mrv2lab.recording.schema import Diff, Publish, RecordingError
from mrv2lab.recording.snapshots import Packed, Snapshots
from tests.recording.rewind import complete, differences, way
from tests.recording.runs import ASYNC, SYNC, Run, random_run
from tests.slow import mostly_slow

RUNS: dict[str, dict[str, Any]] = {
    "sync": {"options": SYNC},
    "async": {"options": ASYNC},
    "reset": {"options": ASYNC, "seed": 2, "resets": (70, 71, 140)},
    "pinned_copy": {"options": ASYNC | {"transfer": "pinned_copy"}, "seed": 3},
    "barrier": {"options": SYNC | {"transfer": "barrier", "lag": 1}, "seed": 4},
}


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {name: random_run(200 if name in ("sync", "async") else 150, **how) for name, how in RUNS.items()}


@pytest.fixture
def run(runs: dict[str, Run]) -> Run:
    """A run of one's own, to be spoiled."""
    return copy.deepcopy(runs["async"])


# -- the central promise -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("order", mostly_slow(["random", "forwards", "backwards"], 1))
def test_rewind_is_exact(runs: dict[str, Run], name: str, order: str) -> None:
    run = runs[name]
    replay = Replay(run)
    for index in way(complete(run), order):
        assert differences(replay, run, index) == [], f"step {index}"
        assert replay.state_hash() == hash_tables(run.live[index])


def test_the_runs_are_not_boring(runs: dict[str, Run]) -> None:
    """Preemptions and resumptions, chunks, hits, aborts, rows with stale tails and steps without tokens occur."""
    for name in ("sync", "async"):
        steps = runs[name].steps
        kinds = Counter(kind for step in steps for kind, *_ in step.decisions)
        assert kinds["preempt"] > 5 and kinds["prefix_hit"] > 20 and kinds["budget"] > 5 and kinds["no_blocks"] > 5
        assert sum(new.resumed for step in steps for new in step.new) > 5
        assert any(not tokens for step in steps for tokens in step.sampled or ()), "no unfinished prefill"
        ended = {req_id for step in steps for req_id in step.finish_reasons}
        assert {req_id for step in steps for req_id in step.finished} - ended, "nobody was aborted"
        sizes = [len(step.req_ids) for step in steps]
        assert any(after < before for before, after in pairwise(sizes)), "no dirty rows"
    assert any(not len(step.rows) for step in runs["sync"].steps), "no step without tokens"
    assert sum(step.keyframe is not None for step in runs["reset"].steps) == 4


def test_a_step_in_numbers() -> None:
    """One request, prompt of 5, two steps: what each table holds."""
    from mrv2lab.engine.engine import Engine
    from mrv2lab.protocol import SamplingParams
    from tests.engine.small import MODEL
    from tests.recording.runs import SIZES, Capture

    with Engine(MODEL, device="cpu", **SIZES | SYNC) as engine:
        capture = Capture(engine)
        engine.submit([11, 12, 13, 14, 15], SamplingParams(4, ignore_eos=True), request_id="a")
        capture.step()
        capture.step()
        token, second = engine.output("a").token_ids
    replay = Replay(capture.run)
    replay.seek(0)
    t = replay.tables
    assert replay.owners == {"a": 7}
    assert [t[name][7] for name in ("prompt_len", "prefill_len", "total_len", "num_computed_tokens")] == [5, 5, 6, 5]
    assert t["all_token_ids"][7, :7].tolist() == [11, 12, 13, 14, 15, token, 0]
    assert t["last_sampled_tokens"][7] == token
    assert t["num_blocks"].tolist() == [[0, 0, 0, 0, 0, 0, 0, 2]]
    assert t["input_ids"][:6].tolist() == [11, 12, 13, 14, 15, 0]
    assert t["positions"][:6].tolist() == [0, 1, 2, 3, 4, 0]
    assert t["query_start_loc"].tolist() == [0, 5, 5, 5, 5, 5, 5, 5, 5]
    assert t["slot_mappings"][0, :6].tolist() == [4, 5, 6, 7, 8, -1]
    replay.seek(1)
    assert t["input_ids"][:3].tolist() == [token, 12, 13], "the tail is what the prefill left"
    assert t["seq_lens"].tolist() == [6, 0, 0, 0, 0, 0, 0, 0]
    assert t["slot_mappings"][0, :3].tolist() == [9, -1, -1]
    assert t["all_token_ids"][7, :7].tolist() == [11, 12, 13, 14, 15, token, second]
    replay.seek(0)
    assert t["all_token_ids"][7, :7].tolist() == [11, 12, 13, 14, 15, token, 0]


# -- what is not known -------------------------------------------------------------------------------------------------


def test_a_step_in_flight_stops_behind_its_gather(run: Run) -> None:
    """A live source: the step becomes whole once its tokens are there."""
    tokens, run.steps[60].sampled = run.steps[60].sampled, None
    del run.steps[61:]
    assert run.steps[60].req_ids
    replay = Replay(run)
    assert len(replay) == 61
    wrong = differences(replay, run, 60)
    assert not replay.complete
    late = {"total_len", "num_computed_tokens", "last_sampled_tokens", "all_token_ids", "num_rejected"}
    assert {"total_len", "num_computed_tokens"} <= set(wrong) <= late
    run.steps[60].sampled = tokens
    assert differences(replay, run, 60) == []
    assert replay.complete


def test_nothing_behind_a_step_in_flight_is_known(run: Run) -> None:
    run.steps[60].sampled = None
    run.steps[61:] = run.steps[61:62]
    run.steps[61].sampled = None
    replay = Replay(run)
    assert len(replay) == 61
    step = run.steps[60].step
    with pytest.raises(StateUnknown, match=f"the tokens of step {step} did not come"):
        replay.seek(61)
    assert differences(replay, run, 59) == []


def test_a_keyframe_goes_on_where_tokens_never_came(runs: dict[str, Run]) -> None:
    run = runs["reset"]
    lost = [index for index in range(len(run.steps)) if index not in complete(run)]
    assert 69 in lost and 139 in lost
    replay = Replay(run)
    assert len(replay) == len(run.steps)
    assert differences(replay, run, 140) == []  # at once, over two gaps
    assert replay.verify() == []


def test_a_growing_recording(run: Run) -> None:
    rest, run.steps = run.steps[100:], run.steps[:100]
    replay = Replay(run)
    assert differences(replay, run, 99) == []
    run.steps += rest
    assert len(replay) == 200
    assert differences(replay, run, 150) == []


def test_a_record_that_is_still_being_written(run: Run) -> None:
    """A live engine that stands between two phases: what is known grows, in the same record."""
    index = next(i for i, record in enumerate(run.steps) if i > 30 and record.new and record.sampled)
    del run.steps[index + 1 :]
    whole, record = run.steps[index], copy.deepcopy(run.steps[index])
    record.sampled, record.req_ids, record.diffs, record.new = None, [], [], []
    record.rows = record.num_scheduled = np.empty(0, np.int32)
    run.steps[index] = record
    replay = Replay(run)
    replay.seek(index)
    assert replay.owners != run.owners[index]
    record.diffs, record.new, record.rows = whole.diffs, whole.new, whole.rows
    record.req_ids, record.num_scheduled = whole.req_ids, whole.num_scheduled
    replay.seek(index)
    assert replay.owners == run.owners[index] and not replay.complete
    assert np.array_equal(replay.tables["input_ids"], run.live[index]["input_ids"])
    record.sampled = whole.sampled
    assert differences(replay, run, index) == []


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: record.diffs.append(Diff("total_len", -1, 0, np.array([1], np.int32))),
        lambda record: record.diffs.append(Diff("total_len", 8, 0, np.array([1], np.int32))),
        lambda record: record.diffs.append(Diff("all_token_ids", 0, 47, np.array([1, 2], np.int32))),
        lambda record: record.diffs.append(Diff("no such table", 0, 0, np.array([1], np.int32))),
        lambda record: record.publishes.append(Publish("num_blocks", np.array([-1]), np.array([1], np.int32))),
        lambda record: record.publishes.append(Publish("num_blocks", np.array([8]), np.array([1], np.int32))),
        lambda record: record.publishes.append(Publish("nothing", np.array([0]), np.array([1], np.int32))),
        lambda record: record.removed.append(("x", 8)),
        lambda record: record.owners.update(x=-1),
        lambda record: setattr(record, "rows", record.rows - 8),
        lambda record: setattr(record, "num_scheduled", record.num_scheduled + 14),
        lambda record: setattr(record, "num_scheduled", record.num_scheduled * 0),
        lambda record: setattr(record, "req_ids", record.req_ids[1:]),
        lambda record: setattr(record, "sampled", record.sampled[1:]),
        lambda record: setattr(record, "keyframe", {"no such table": np.zeros(3)}),
        lambda record: setattr(record, "keyframe", {"total_len": np.zeros(3)}),
    ],
)
def test_a_record_that_does_not_fit_is_refused(run: Run, spoil: Any) -> None:
    index = next(i for i, record in enumerate(run.steps) if i > 30 and len(record.rows) > 1)
    spoil(run.steps[index])
    replay = Replay(run)
    with pytest.raises(RecordingError, match=f"step {run.steps[index].step} does not fit the recording's tables"):
        replay.seek(index)
    assert differences(replay, run, index - 1) == []


def test_an_index_outside(run: Run) -> None:
    replay = Replay(run)
    for index in (-1, 200):
        with pytest.raises(IndexError, match=rf"no step at index {index}; the recording has 200 \(0..199\)"):
            replay.seek(index)


def test_recordings_that_cannot_be_replayed(run: Run) -> None:
    header = run.header
    run.header = dataclasses.replace(header, runner="v1")
    with pytest.raises(RecordingError, match="only recordings of the mrv2 runner can be replayed; this one is of 'v1'"):
        Replay(run)
    run.header = dataclasses.replace(header, tables={k: v for k, v in header.tables.items() if k != "seeds"})
    with pytest.raises(RecordingError, match="it has no table seeds"):
        Replay(run)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("seeds", (7,), "int64"),
        ("seeds", (8,), "float32"),
        ("temperature", (8,), "int32"),
        ("query_start_loc", (8,), "int32"),
        ("num_blocks", (2, 8), "int32"),
        ("total_len", (8, 1), "int32"),
        ("input_block_table.0", (8, 11), "int32"),
        ("all_token_ids", (8, 0), "int32"),
    ],
)
def test_tables_that_do_not_go_together(run: Run, name: str, shape: tuple[int, ...], dtype: str) -> None:
    run.header = dataclasses.replace(run.header, tables=run.header.tables | {name: (shape, dtype)})
    with pytest.raises(
        RecordingError, match=r"cannot be replayed: table .* does not go with the other tables; expected"
    ):
        Replay(run)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_few_snapshots_are_exact_too(run: Run) -> None:
    replay = Replay(run)
    replay._snapshots = Snapshots(every=2, budget=20_000)
    for index in way(complete(run), "random"):
        assert differences(replay, run, index) == []
    assert replay._snapshots.nbytes <= 20_000
    assert replay._snapshots.every >= 16


def test_a_snapshot_that_is_wrong_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: what lies behind the packed part is not cleared when it is restored."""

    def restore(self: Packed, table: np.ndarray[Any, Any]) -> None:
        table[tuple(slice(a, a + n) for a, n in zip(self.corner, self.values.shape, strict=True))] = self.values

    monkeypatch.setattr(Packed, "restore", restore)
    replay = Replay(run)
    assert any(differences(replay, run, index) for index in way(complete(run), "backwards"))


@pytest.mark.slow
def test_a_jump_is_fast() -> None:
    """200 steps of 64 requests in 1,024 rows of 4,096 tokens: any step in under 100 ms of CPU time, few megabytes."""
    from mrv2lab.engine.engine import Engine
    from mrv2lab.protocol import SamplingParams
    from tests.engine.small import MODEL
    from tests.recording.runs import Capture

    model = dataclasses.replace(MODEL, max_position_embeddings=4096, eos_token_ids=())
    sizes = {"max_num_reqs": 1024, "max_model_len": 4096, "num_blocks": 4096, "max_num_batched_tokens": 2048}
    rng = np.random.default_rng(0)
    with Engine(model, device="cpu", **sizes) as engine:
        capture = Capture(engine)
        for _ in range(64):
            prompt = rng.integers(0, 61, int(rng.integers(10, 300))).tolist()
            engine.submit(prompt, SamplingParams(int(rng.integers(150, 300))))
        while len(capture.run.steps) < 200:
            engine.step()
    replay = Replay(capture.run)
    replay.seek(199)
    assert replay._snapshots.nbytes < 16 << 20
    took = []
    for index in rng.permutation(200).tolist():
        began = time.thread_time()
        replay.seek(index)
        took.append(time.thread_time() - began)
    assert np.median(took) < 0.1, f"{np.median(took):.3f} s"


@pytest.mark.parametrize("where", ["run", "restore"])
def test_an_interrupt_leaves_the_replay_usable(run: Run, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    owner: Any = OpCall if where == "run" else Packed
    whole, calls = getattr(owner, where), []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 7:
            raise KeyboardInterrupt
        whole(*args)

    replay = Replay(run)
    replay.seek(150)
    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        replay.seek(90)
    for index in (150, 90, 91):
        assert differences(replay, run, index) == []
