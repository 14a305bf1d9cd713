"""V1's penalties: what is rebuilt and copied in every step, and that placeholders do not count."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.runner_v1.penalties import OutputTokenIds, count_tokens
from mrv2lab.runtime.cpu import CpuRuntime
from tests.runner_v1.sampling import SamplingBench


def test_output_ids_are_padded_with_the_vocabulary_size() -> None:
    rt = CpuRuntime()
    sent = OutputTokenIds(rt).send([[3, 4, 3], [], None, [1, -1]], 9)
    assert rt.read(sent).tolist() == [[3, 4, 3], [9, 9, 9], [9, 9, 9], [1, 9, 9]]
    assert rt.read(count_tokens_on(rt, sent))[0].tolist() == [0, 0, 0, 2, 1, 0, 0, 0, 0]


def count_tokens_on(rt: CpuRuntime, sent: torch.Tensor) -> torch.Tensor:
    out = rt.zeros((len(sent), 9), torch.int64, name="counts")
    rt.register("count", lambda out, ids: out.copy_(count_tokens(ids, 9)))
    rt.run("count", out, sent, writes=(out,))
    return out


@pytest.mark.parametrize("length", [1, 10, 50])
def test_the_copy_of_a_step_grows_with_the_outputs(length: int) -> None:
    """mrv2.md 4.4, 47: every row's outputs, 8 bytes a token, in every step, for one row that has a penalty."""
    bench = SamplingBench(20)
    bench.add(outputs=[3] * length, presence_penalty=0.5)
    bench.add(outputs=[4])
    log = bench.listen()
    for _ in range(2):
        bench.step(torch.zeros(2, 20))
    copies = [mark.nbytes for mark in log.marks if mark.kind == "h2d" and mark.name.startswith("output_token_ids")]
    assert copies == [2 * length * 8] * 2


def test_prompts_are_copied_when_rows_change_only() -> None:
    bench = SamplingBench(20)
    bench.add([5, 6], repetition_penalty=2.0)
    bench.step(torch.ones(1, 20))
    log = bench.listen()
    bench.sampler.sample(bench.sampled[:1], bench.logits[:1], bench.batch)
    names = {mark.name.partition(".")[0] for mark in log.marks if mark.kind == "h2d"}
    assert names == {"output_token_ids"}


def test_a_placeholder_would_count_as_nothing() -> None:
    """vLLM maps -1 to V, too; that it does not stay -1 is the repair's business."""
    bench = SamplingBench(4)
    bench.add([0], [1, -1], presence_penalty=1.0)
    assert bench.step([[0.0] * 4])[0].tolist() == [[0, -1, 0, 0]]
