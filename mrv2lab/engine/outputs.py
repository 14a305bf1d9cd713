"""What the user gets back: a request's text so far or in full, and a run's account."""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

from mrv2lab.engine.records import SchedulerStats


@dataclass(slots=True)
class RequestOutput:
    """One request's outcome. ``new_token_ids`` and ``new_text`` are what the last step added (for streaming)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    new_token_ids: list[int] = field(default_factory=list)
    new_text: str = ""
    steps: int = 0
    """Engine steps between submission and end."""

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
