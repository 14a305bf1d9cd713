"""What the user gets back: a request's text so far or in full, and a run's account."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pandas as pd

from mrv2lab.engine.account import Accounted
from mrv2lab.engine.logprobs import LogprobRows
from mrv2lab.engine.records import SchedulerStats


@dataclass(slots=True)
class RequestOutput(Accounted):
    """One request's outcome. ``new_token_ids`` and ``new_text`` are what the last step added (for streaming).

    Text that may still turn out to be the beginning of a stop string, or that lacks the last byte of a character, is
    not in it yet. Read ``token_ids`` anew after a step: a list that was taken from it earlier may grow late.
    """

    accounted: ClassVar[frozenset[str]] = frozenset(("token_ids", "new_token_ids", "steps"))
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    """``"stop"``, ``"length"``, ``"abort"``, ``"error"``; None while it runs."""
    new_token_ids: list[int] = field(default_factory=list)
    new_text: str = ""
    steps: int = 0
    """Engine steps between submission and end."""
    stop_reason: str | int | None = None
    """The stop string, or the token id (EOS too), that ended it."""
    error: str = ""
    """Why it ended, where the reason is ``"error"``: a custom processor that raised, say. Nobody else is harmed."""
    logprobs: LogprobRows | None = None
    """One entry a token of ``token_ids``, where ``SamplingParams.logprobs`` asked for them."""
    prompt_logprobs: LogprobRows | None = None
    """One entry a token of the prompt (None for the first), once the prompt is computed and if they were asked for."""
    num_nans: int = 0
    """NaN logits in its rows, all steps together; each counted as minus infinity."""

    def __post_init__(self) -> None:
        self.arrears = None  # type: ignore[misc]  # a slot of the base class

    @property
    def finished(self) -> bool:
        """Whether the request is over."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RunReport:
    """What :meth:`Engine.run` did."""

    workload: str
    outputs: dict[str, RequestOutput]
    steps: int
    seconds: float
    stats: SchedulerStats

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated, all requests together."""
        return sum(len(output.token_ids) for output in self.outputs.values())

    def to_frame(self) -> pd.DataFrame:
        """One row a request: lengths, steps, finish reason, text."""
        return pd.DataFrame(
            [
                {
                    "request": output.request_id,
                    "prompt_tokens": len(output.prompt_token_ids),
                    "output_tokens": len(output.token_ids),
                    "steps": output.steps,
                    "finish_reason": output.finish_reason,
                    "text": output.text,
                }
                for output in self.outputs.values()
            ]
        )

    def __repr__(self) -> str:
        return (
            f"{self.workload}: {len(self.outputs)} requests, {self.num_output_tokens} tokens, {self.steps} steps, "
            f"{self.seconds:.2f} s\n  {self.stats.num_preemptions} preemptions, {self.stats.wasted_rows} wasted rows, "
            f"{self.stats.prefix_hit_tokens} prefix-hit tokens"
        )
