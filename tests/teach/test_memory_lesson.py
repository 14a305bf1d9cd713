"""Hashes, launches, pictures and exercises of the lesson on dummy runs and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mrv2lab.check.memory_ledger import growth
from mrv2lab.config import QWEN3_0_6B, EngineConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.kv_cache_config import KVCacheConfig
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner.profile_memory import MemoryProfile
from mrv2lab.teach import memory_exercises, memory_lesson
from mrv2lab.teach.profile_pictures import profile_picture

SMALL: dict[str, Any] = {
    "device": "cpu",
    "num_blocks": 64,
    "max_num_reqs": 4,
    "max_model_len": 128,
    "progress": False,
}


@pytest.fixture(scope="module", params=["mrv2", "v1"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Three requests decode."""
    with Engine("tiny", request.param, **SMALL) as made:
        for i in range(3):
            made.submit([i + 1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
        for _ in range(4):
            made.step()
        yield made


# -- hashes and launches -----------------------------------------------------------------------------------------------


def test_a_step_changes_the_state_and_a_dummy_run_does_not(engine: Engine) -> None:
    before = memory_lesson.state_hash(engine)
    engine.worker.runner.dummy_run(3, 3)
    assert memory_lesson.changed(before, memory_lesson.state_hash(engine)) == []
    engine.step()
    changed = memory_lesson.changed(before, memory_lesson.state_hash(engine))
    assert {"key_cache.0", "value_cache.4"} <= set(changed)
    assert not any(name.startswith(memory_lesson.STEP_INPUTS) for name in before.index)


def test_a_row_of_somebody_is_seen_in_the_kv_cache() -> None:
    with Engine("tiny", **SMALL) as engine:
        engine.submit([1, 2, 3], SamplingParams(max_tokens=9))
        engine.step()
        engine.step()
        (row,) = engine.worker.runner.req_states.req_id_to_index.values()
        before = memory_lesson.state_hash(engine)
        with memory_lesson.somebodys_row(row):
            engine.worker.runner.dummy_run(5, 1)
        assert "key_cache.0" in memory_lesson.changed(before, memory_lesson.state_hash(engine))
        before = memory_lesson.state_hash(engine)
        engine.worker.runner.dummy_run(5, 1)
        assert memory_lesson.changed(before, memory_lesson.state_hash(engine)) == [], "the bug is gone with its `with`"


def test_mrv2_launches_a_part_of_a_step_and_v1_a_copy(engine: Engine) -> None:
    step = memory_lesson.launches(engine, engine.step)
    dummy = memory_lesson.launches(engine, lambda: engine.worker.runner.dummy_run(3, 3))
    table = memory_lesson.launch_table(step=step, dummy_run=dummy)
    layers = engine.config.model.num_hidden_layers
    assert table.loc["(the decoder's segments)"].tolist() == [3 * layers + 2] * 2
    strange = table[(table["dummy_run"] > table["step"])].index.tolist()
    if engine.config.runner.runner == "mrv2":
        assert strange == []
        assert table.loc["slot_mapping"].tolist() == [1, 1] and table.loc["post_update"].tolist() == [1, 0]
    else:
        assert strange == ["v1.dummy_inputs"]
        assert table.loc["slot_mapping"].tolist() == [1, 0]


def test_inputs_of_nobody() -> None:
    with Engine("tiny", **SMALL) as engine:
        engine.worker.runner.dummy_run(3, 2)
        shown = memory_lesson.batch_inputs(engine, 2, 3)
    assert shown["rows (idx_mapping)"] == "-1 -1"
    assert shown["slots (where KV is written)"] == "-1 -1 -1"
    assert shown["query_start_loc"] == "0 1 3"
    assert shown["block table of the first request"] == "0 0 0 0 0 0 0 0"


def test_classes_of_integers() -> None:
    frame = memory_lesson.kernels_to_compile([1, 2, 16, 17, 32])
    assert frame["counts"].to_dict() == {"1": "1", "a multiple of 16": "16, 32", "any other": "2, 17"}
    assert memory_lesson.kernels_to_compile(range(2, 12)).loc["any other", "counts"].endswith("... (10 in all)")


def test_no_kernel_is_compiled_where_specs_run(engine: Engine) -> None:
    with memory_lesson.compilations(engine) as compiled:
        engine.step()
    assert compiled == []


# -- the picture -------------------------------------------------------------------------------------------------------


def size_of(profile: MemoryProfile | None) -> KVCacheConfig:
    return KVCacheConfig(25, 16, (25, 4, 1, 1), 1, (0,), profile)


PROFILE = MemoryProfile(1000, 0.9, tensors=300, other=100, step_peak=60, graphs=30)
"""900 - 490 = 410 bytes: 25 blocks of 16, and 10 bytes."""


def test_the_picture_has_every_part_and_a_second_cue() -> None:
    figure = profile_picture({"0.9": size_of(PROFILE)})
    assert sum(bar.x[0] for bar in figure.data) * 2**20 == pytest.approx(1000)
    assert len({(bar.marker.color, bar.marker.pattern.shape) for bar in figure.data}) == 6
    assert next(bar.text[0] for bar in figure.data if bar.name == "KV cache") == "25 blocks"
    with pytest.raises(ValueError, match=r"0\.5 was not measured"):
        profile_picture({"0.5": size_of(None)})


# -- exercises ---------------------------------------------------------------------------------------------------------

QWEN = EngineConfig(QWEN3_0_6B)
BLOCK = 2 * 28 * 16 * 8 * 128 * 2


def test_a_block() -> None:
    check = memory_exercises.check_block_bytes
    assert check(QWEN, BLOCK).right
    for wrong, hint in (
        (None, "in place of None"),
        (BLOCK // 2, "keys and values are two tensors, and a bfloat16 takes 2 bytes"),
        (BLOCK // 28, "one layer's"),
        (BLOCK // 16, "one token's"),
        (BLOCK * 2, "2 times as many heads"),
        (7, "2 tensors x layers"),
    ):
        verdict = check(QWEN, wrong)
        assert not verdict.right and hint in verdict.reason


def test_number_of_blocks() -> None:
    check = memory_exercises.check_num_blocks
    assert check(size_of(PROFILE), 25).right
    for wrong, hint in (
        (None, "in place of None"),
        (25.6, "no whole number"),
        (31, "utilization is a share"),
        (56, "are there already"),
        (26, "rounded up"),
        (24, "null block"),
        (3, "rounded down"),
    ):
        verdict = check(size_of(PROFILE), wrong)
        assert not verdict.right and hint in verdict.reason
    with pytest.raises(ValueError, match="was not measured"):
        check(size_of(None), 25)


def _counts(tokens: int, reqs: int) -> Any:
    return np.array([tokens - reqs + 1] + [1] * (reqs - 1))


def test_nobody() -> None:
    check = memory_exercises.check_nobody
    assert check(lambda tokens, reqs: (np.full(reqs, -1), _counts(tokens, reqs))).right
    wrongs: tuple[tuple[Any, str], ...] = (
        (lambda t, r: (np.arange(r), _counts(t, r)), "row 0 is free"),
        (lambda t, r: (np.full(r, 2), _counts(t, r)), "row 2 is r2's"),
        (lambda t, r: (np.full(r, 4), _counts(t, r)), "there are rows 0 to 3"),
        (lambda t, r: (np.full(r, -2), _counts(t, r)), "there are rows 0 to 3"),
        (lambda t, r: (np.full(r, -1), np.full(r, t // r)), "are not 7 tokens"),
        (lambda t, r: (np.full(1, -1), _counts(t, r)), "should be 4 integers"),
        (lambda t, r: (np.full(r, -1.0), _counts(t, r)), "should be 1 integers"),
        (lambda t, r: 1 // 0, "raised ZeroDivisionError"),
    )
    for wrong, hint in wrongs:
        verdict = check(wrong)
        assert not verdict.right and hint in verdict.reason


def test_counts() -> None:
    check = memory_exercises.check_counts
    assert check((1, 3, 16)).right and check((1, 7, 256)).right
    for wrong, hint in (
        (None, "in place of None"),
        ((1, 2, 3), "16 is a multiple of 16"),
        ((3, 16), "1 is 1"),
        ((1, 16, 32), "2 is any other"),
        ((1, 3, 16, 32), "more than 3"),
        ((0, 1), "positive integers"),
        ((), "positive integers"),
    ):
        verdict = check(wrong)
        assert not verdict.right and hint in verdict.reason


def test_rows() -> None:
    check, limit = memory_exercises.check_rows, 64 << 20
    low, high = 1, 4096
    while high - low > 1:  # the learner's search
        middle = (low + high) // 2
        scheduler = dataclasses.replace(QWEN.scheduler, max_model_len=4096)
        frame = growth(dataclasses.replace(QWEN, scheduler=scheduler), "max_num_reqs", [middle])
        low, high = (middle, high) if frame["device"].iloc[0] <= limit else (low, middle)
    assert check(QWEN, 4096, limit, low).right
    for wrong, hint in (
        (None, "in place of None"),
        (low + 1, "bytes of the device (and"),
        (low - 1, "one row more fits"),
        (0, "positive"),
        (True, "positive"),
    ):
        verdict = check(QWEN, 4096, limit, wrong)
        assert not verdict.right and hint in verdict.reason
