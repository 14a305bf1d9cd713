"""What the host may wait for in a step; the invariants themselves are in ``mrv2lab.check.invariants``."""

from __future__ import annotations

from mrv2lab.check.invariants import check_invariants

__all__ = ["check_invariants", "waits_of_a_step"]


def waits_of_a_step(names: list[str], policy: str) -> list[str]:
    """Which of a step's waits should not be there: all but the output's and, under ``barrier``, the barrier's."""
    allowed = {"prepare_inputs"} if policy == "barrier" else set()
    return [
        name for name in names if not (name.startswith("sampled.") and name.endswith(".copied")) and name not in allowed
    ]
