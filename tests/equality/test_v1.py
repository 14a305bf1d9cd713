"""V1 in its own batch order against Hugging Face (near): some of the workloads, in each order a backend may ask."""

from __future__ import annotations

import pytest

from mrv2lab.check import workloads
from tests.equality.compare import NearReport, compare_exact, compare_near, reference_logits
from tests.equality.models import hf_model
from tests.equality.settings import run_case, settings

CASES = [pytest.param(i, marks=[] if i in (1, 2) else [pytest.mark.slow]) for i in range(40)]


@pytest.mark.parametrize("index", CASES)
def test_v1_against_hugging_face(index: int) -> None:
    """Greedy tokens and logits; then the same requests drawing: the logits along V1's own tokens, whatever it drew."""
    setting = settings()[index]
    reference = hf_model(setting["model"])
    options = {"runner": "v1", "reorder": ("none", "decode_first")[index % 2]}
    total = NearReport()
    for sampling in ("greedy", "mixed"):
        vocab = reference.config.vocab_size
        case = workloads.make_case(index, setting | {"sampling": sampling}, vocab_size=vocab, max_requests=16)
        trace = run_case(case, **options)
        total += compare_near(trace, reference_logits(reference, trace), tokens=sampling == "greedy")
        assert trace.stats.num_preemptions or setting["pool"] == "roomy"
        # In the same order on another stream and policy, draws included: one generator a seed, one for the others.
        compare_exact(trace, run_case(case, **options | case.other_transport()))
    assert total.rows > 100
    assert total.excused <= max(1, 0.005 * total.rows), total.excuses
