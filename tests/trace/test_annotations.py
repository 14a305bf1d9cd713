from __future__ import annotations

import pytest

from mrv2lab.trace.annotations import Batch, StepName, batch_range, names_step, parse_batch, parse_step

NAMES = {
    "execute_context_1(888_788544)_generation_0(0)": StepName("vllm", None, 1, 888, 0, 0, "prefill"),
    "execute_context_3(120)_generation_2(50)": StepName("vllm", None, 3, 120, 2, 50, "mixed"),
    "execute_context_0(0)_generation_0(0)": StepName("vllm", None, 0, 0, 0, 0, "unknown"),
    "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)": StepName(
        "vllm", None, 0, 0, 32, 32, "decode"
    ),
    "execute_8192_context_9(sq8155sk8430sqsq7475785sqsk7671310)_generation_37(sq37sk34489sqsq37sqsk34489)": StepName(
        "vllm", None, 9, 8155, 37, 37, "mixed"
    ),
    "execute_context_1(many)_generation_0(0)": StepName("vllm", None, 1, None, 0, 0, "prefill"),
    # A cached request may be in a later part of its prefill or in decode.
    "execute_new_2_cached_0": StepName("vllm", None, 2, None, 0, 0, "prefill"),
    "execute_new_2_cached_5": StepName("vllm"),
    "execute_new_0_cached_5": StepName("vllm"),
    "step[EXTEND bs=1 toks=107]": StepName("sglang", None, 1, 107, 0, 0, "prefill"),
    "step[EXTEND bs=1]": StepName("sglang", None, 1, None, 0, 0, "prefill"),
    "step[DECODE bs=16]": StepName("sglang", None, 0, 0, 16, None, "decode"),
    "step[MIXED bs=2]": StepName("sglang", kind="mixed", requests=2),
    "step[TARGET_VERIFY bs=2]": StepName("sglang", requests=2),
    "step[IDLE]": StepName("sglang"),
    "ProfilerStep#5": StepName("ProfilerStep", 5),
    "mrv2lab.step#12": StepName("mrv2lab", 12),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_steps(name: str) -> None:
    assert parse_step(name) == NAMES[name]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "step",
        "step[]",
        "ProfilerStep",
        "ProfilerStep#",
        "ProfilerStep#x",
        "ProfilerStep#5 again",
        "mrv2lab.phase.forward",
        "execute_context_1(1)",
        "execute_context_1(1)_generation_0(0)_more",
        "## execute_context_1(1)_generation_0(0) ##",
        "nccl:all_reduce",
        "execute_model",
    ],
)
def test_other_names(name: str) -> None:
    assert parse_step(name) is None


@pytest.mark.parametrize("digits", [30, 5000])
def test_a_number_that_no_integer_column_holds_is_none(digits: int) -> None:
    nines = "9" * digits
    assert parse_step(f"ProfilerStep#{nines}") is None
    assert parse_step(f"execute_context_{nines}(1)_generation_0(0)") is None
    one = parse_step(f"step[DECODE bs={nines}]")
    assert one is not None and one.generation_requests is None
    one = parse_step(f"execute_context_1({nines})_generation_0(0)")
    assert one is not None and one.context_tokens is None


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (Batch(2, 300, 0, 0), "prefill"),
        (Batch(0, 0, 64, 64), "decode"),
        (Batch(1, 7, 3, 12), "mixed"),
        (Batch(0, 0, 0, 0), "unknown"),
    ],
)
def test_the_name_of_a_batch_is_read_back(batch: Batch, kind: str) -> None:
    name = batch_range(41, batch)
    assert parse_batch(name) == (41, batch)
    assert parse_step(name) is None and names_step(name)
    step = batch.step_name("mrv2lab", 41)
    assert (step.number, step.kind, step.context_requests, step.generation_tokens) == (41, kind, batch[0], batch[3])


@pytest.mark.parametrize(
    "name",
    [
        "mrv2lab.step#1",
        "mrv2lab.execute#1",
        "mrv2lab.execute#_context_1(1)_generation_0(0)",
        "mrv2lab.execute#1_context_1(1)_generation_0(0) again",
        f"mrv2lab.execute#1_context_{'9' * 30}(1)_generation_0(0)",
        "execute_context_1(1)_generation_0(0)",
    ],
)
def test_no_names_of_batches(name: str) -> None:
    assert parse_batch(name) is None
