"""DESIGN.md's two classes of equality, and the reference of the near one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mrv2lab.check.compare import BFLOAT16_BOUND, FLOAT32_BOUND, NearReport, judge
from tests.equality.harness import Trace


@torch.inference_mode()
def reference_logits(model: Any, trace: Trace) -> dict[str, torch.Tensor]:
    """Hugging Face's logits [n, V] along each request's own tokens, without a cache; requests without outputs left out.

    One right-padded batch: attention is causal, so padding behind a sequence does not reach it.
    """
    made: dict[str, torch.Tensor] = {}
    sequences = [(req_id, o.prompt_token_ids, o.token_ids) for req_id, o in trace.outputs.items() if o.token_ids]
    for first in range(0, len(sequences), 32):
        some = sequences[first : first + 32]
        width = max(len(prompt) + len(tokens) for _, prompt, tokens in some)
        ids = torch.zeros((len(some), width), dtype=torch.int64)
        for row, (_, prompt, tokens) in enumerate(some):
            ids[row, : len(prompt) + len(tokens)] = torch.tensor(prompt + tokens)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        for row, (req_id, prompt, tokens) in enumerate(some):
            made[req_id] = model.lm_head(hidden[row, len(prompt) - 1 : len(prompt) + len(tokens) - 1])
    return made


def compare_near(
    trace: Trace, reference: dict[str, torch.Tensor], *, bound: float = FLOAT32_BOUND, tokens: bool = True
) -> NearReport:
    """Raises ``AssertionError`` for a row further off than ``bound`` max|ref|, or a token that differs from the
    reference's choice by more than numbers explain. bfloat16 compares no tokens."""
    report = NearReport()
    assert set(reference) == set(trace.logits)
    for req_id, want in reference.items():
        got, output = trace.logits[req_id], trace.outputs[req_id]
        assert got.shape == want.shape
        off, scale = (got - want).abs().amax(-1), want.abs().amax(-1)
        ratio = off / scale
        assert bool((ratio <= bound).all()), (  # false for NaN
            f"{req_id}: logits of outputs {(~(ratio <= bound)).nonzero().flatten().tolist()} of {len(ratio)} are up to "
            f"{ratio.max().item():.2g} max|ref| off"
        )
        report.worst = max(report.worst, float(ratio.max()))
        report.ratios += ratio.tolist()
        report.rows += len(want)
        if tokens:
            report.tokens += len(output.token_ids)
            first = len(output.prompt_token_ids) - 1
            scored = (trace.params[req_id], trace.seeds[req_id])
            for index, token in enumerate(output.token_ids):
                verdict = judge(want[index].numpy(), float(off[index]), token, *scored, first + index)
                assert verdict.kind != "wrong", f"{req_id} output {index}: {verdict.text}"
                if verdict.kind == "excused":
                    report.excused += 1
                    report.excuses.append(f"{req_id} output {index}: {verdict.text}")
    return report


def off_by(got: torch.Tensor, want: torch.Tensor) -> np.ndarray[Any, Any]:
    """max|d| / max|ref| of every row. got, want: [n, V]; NaN where ``got`` has one."""
    ratios: np.ndarray[Any, Any] = ((got.float() - want).abs().amax(-1) / want.abs().amax(-1)).numpy()
    return ratios


def bfloat16_figures(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> str:
    """What to print of both's ``off_by``."""
    each = [
        f"median {np.median(r):.2g}, 95 % {np.quantile(r, 0.95):.2g}, worst {r.max():.2g}, over 2e-2: "
        f"{int((r > BFLOAT16_BOUND).sum())} of {len(r)}"
        for r in (ours, theirs)
    ]
    return f"ours {each[0]}; transformers' own {each[1]}"


def no_further_off(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> None:
    """Raises ``AssertionError`` if our bfloat16 rows are further off a float32 reference than transformers' own.

    Where theirs are all within 2e-2, so must ours be, but for 2 rows of a hundred. The worst row of some hundred is
    chance: up to 2.5 times theirs.
    """
    figures = bfloat16_figures(ours, theirs)
    assert np.isfinite(ours).all(), figures
    assert np.median(ours) <= 1.2 * np.median(theirs), figures
    assert (ours > BFLOAT16_BOUND).mean() <= (theirs > BFLOAT16_BOUND).mean() + 0.02, figures
    assert ours.max() <= max(BFLOAT16_BOUND, 2.5 * theirs.max()), figures


def compare_exact(a: Trace, b: Trace, *, positions: bool = True) -> None:
    """The same batches, and then every token and every logits row bit for bit, wasted rows included."""
    assert a.batches == b.batches, _first_difference("batch", a.batches, b.batches)
    for index, (one, other) in enumerate(zip(a.steps, b.steps, strict=True)):
        assert one.sampled == other.sampled, f"step {index}: {one.sampled} != {other.sampled}"
        if positions:
            assert one.positions == other.positions
            assert one.input_ids == other.input_ids
        assert torch.equal(one.logits, other.logits), f"step {index}: logits differ"
    assert a.tokens == b.tokens
    assert a.seeds == b.seeds


def _first_difference(what: str, one: Sequence[Any], other: Sequence[Any]) -> str:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return f"{what} {index}: {left} != {right}"
    return f"{len(one)} and {len(other)} {what}es"
