"""The same workloads on a GPU, against Hugging Face on the CPU: float32 without TF32, and bfloat16."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.model.load import load_model
from tests.equality.compare import BFLOAT16_BOUND, NearReport, compare_exact, compare_near, reference_logits
from tests.equality.models import MODELS, hf_from_weights, hf_model, source
from tests.equality.settings import QUICK, label, make_case, run_case, settings

TOTAL = NearReport()


@pytest.mark.gpu
@pytest.mark.parametrize("index", [pytest.param(index, id=label(index)) for index in range(QUICK)])
def test_float32(index: int) -> None:
    """Near the reference, and bit-equal between two policies."""
    name = settings()[index]["model"]
    source(name)
    reference = hf_model(name)
    case = make_case(index, vocab_size=reference.config.vocab_size, max_requests=24)
    trace = run_case(case, "cuda")
    global TOTAL
    TOTAL += compare_near(trace, reference_logits(reference, trace))
    compare_exact(trace, run_case(case, "cuda", **case.other_transport()))


@pytest.mark.gpu
def test_excused() -> None:
    print(f"\n{TOTAL.rows} rows, {TOTAL.excused} excused, worst {TOTAL.worst:.2g}")
    if TOTAL.rows:
        TOTAL.check()


@cache
def rounded(name: str, dtype: torch.dtype) -> Any:
    """transformers on the CPU with the weights rounded to bfloat16, computing in ``dtype``."""
    made = load_model(source(name), dtype="bfloat16")
    return hf_from_weights(made.config, made.weights).to(dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("model", MODELS)
def test_bfloat16(model: str, device: str) -> None:
    """Logits only, since with random weights several per cent of the rows tie; against float32 with the same weights.

    2e-2 max|ref| a row cannot be asked of everybody: transformers' own bfloat16 is further off in 1 to 3 rows of a
    hundred with random weights, at any hidden size from 64 to 1,024. So we may not be further off than transformers.
    """
    reference = rounded(model, torch.float32)
    index = next(i for i, setting in enumerate(settings()) if setting["model"] == model and setting["stop"] == "length")
    case = make_case(index, vocab_size=reference.config.vocab_size, max_requests=16)
    trace = run_case(case, device, dtype="bfloat16")
    wanted = reference_logits(reference, trace)
    report = compare_near(trace, wanted, bound=5 * BFLOAT16_BOUND, tokens=False)
    ratios = np.array(report.ratios)
    theirs = [
        ((logits.float() - wanted[req_id]).abs().amax(-1) / wanted[req_id].abs().amax(-1)).tolist()
        for req_id, logits in reference_logits(rounded(model, torch.bfloat16), trace).items()
    ]
    other = np.concatenate(theirs)
    figures = [f"{np.quantile(r, q):.3g}" for r in (ratios, other) for q in (0.5, 0.95, 1)]
    print(f"\n{model} on {device}: {report.rows} rows, median, 95 %, worst: ours and theirs {figures}")
    assert np.median(ratios) <= 1.2 * np.median(other)
    assert (ratios > BFLOAT16_BOUND).mean() <= (other > BFLOAT16_BOUND).mean() + 0.02
    assert ratios.max() <= max(BFLOAT16_BOUND, 1.75 * other.max())
