"""A replay, a recorder or a device that is wrong is found by the device's checksums."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mrv2lab.recording import replay as replay_module
from mrv2lab.recording import replay_program
from mrv2lab.recording.replay import Replay
from mrv2lab.recording.replay_checksum import table_checksum
from tests.recording.runs import ASYNC, Run, random_run


@pytest.fixture(scope="module")
def played() -> Run:
    return random_run(200, ASYNC)


@pytest.fixture
def run(played: Run) -> Run:
    """A run of one's own, to be spoiled."""
    return copy.deepcopy(played)


def with_checksums(run: Run, every: int = 16) -> Run:
    """As the device would have sent them."""
    for index in range(every - 1, len(run.steps), every):
        run.steps[index].checksums = {name: table_checksum(name, run.live[index]) for name in run.live[index]}
    return run


def test_verify_is_silent_about_a_true_recording(run: Run) -> None:
    replay = Replay(with_checksums(run))
    assert replay.verify() == []
    assert replay.checked(15) is True
    assert replay.checked(14) is None
    assert replay.divergence(199) is None


def test_a_wrong_checksum_is_one_sentence(run: Run) -> None:
    with_checksums(run).steps[31].checksums["total_len"] ^= 1
    replay = Replay(run)
    sentence = f"step {run.steps[31].step}: total_len on the device differs from the rebuilt one"
    assert replay.verify() == [sentence]
    assert replay.checked(31) is False
    assert replay.divergence(30) is None
    assert replay.divergence(31) == replay.divergence(199) == sentence


def test_a_negative_checksum_is_the_same_64_bits(run: Run) -> None:
    sums = with_checksums(run).steps[15].checksums
    sums |= {name: value - 2**64 for name, value in sums.items()}
    assert Replay(run).verify() == []


def test_forgetting_the_dirty_rows_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with_checksums(run, every=1)
    monkeypatch.setattr(replay_program.State, "num_dirty_rows", property(lambda self: 0, lambda self, value: None))
    said = Replay(run).verify()
    assert said
    assert all(": input_block_table.0 on the device differs" in sentence for sentence in said)


def drop_diff(run: Run, table: str) -> None:
    for record in run.steps[20:]:
        for diff in record.diffs:
            if diff.table == table:
                record.diffs.remove(diff)
                return


def drop_publish(run: Run) -> None:
    next(record for record in run.steps[20:] if record.publishes).publishes.pop()


def drop_request(run: Run) -> None:
    record = next(record for record in run.steps[20:] if len(record.rows) > 1)
    record.req_ids, record.rows, record.num_scheduled = record.req_ids[1:], record.rows[1:], record.num_scheduled[1:]
    assert record.sampled is not None
    record.sampled = record.sampled[1:]


def other_token(run: Run) -> None:
    record = next(record for record in run.steps[20:] if record.sampled and record.sampled[0])
    assert record.sampled is not None
    record.sampled[0] = [record.sampled[0][0] ^ 1]


def no_prefill(run: Run) -> None:
    next(record for record in run.steps[20:] if record.has_prefill).has_prefill = False


@pytest.mark.parametrize(
    "spoil",
    [
        *(lambda run, name=name: drop_diff(run, name) for name in ("all_token_ids", "total_len", "block_table.0")),
        drop_publish,
        drop_request,
        other_token,
        no_prefill,
    ],
    ids="all_token_ids total_len block_table publish request token has_prefill".split(),
)
def test_a_recorder_that_loses_something_is_found(run: Run, spoil: Any) -> None:
    spoil(with_checksums(run, every=1))
    assert Replay(run).verify()


def test_tokens_that_contradict_the_counters_are_found_without_checksums(run: Run) -> None:
    index = next(i for i, record in enumerate(run.steps) if record.sampled and record.sampled[0])
    run.steps[index].sampled[0] = []  # type: ignore[index]
    req_id, step = run.steps[index].req_ids[0], run.steps[index].step
    sentence = f"step {step}: the record has 0 sampled tokens of {req_id}, by the rebuilt state there are 1"
    assert Replay(run).verify()[0] == sentence


def test_progress_is_shown_only_where_it_is_long(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Replay(run).verify()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(replay_module, "LONG", 10)
    Replay(run).verify()
    assert "verify" in capsys.readouterr().err
