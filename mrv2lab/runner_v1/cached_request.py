"""A request as V1's worker remembers it, in the batch or not. Counterpart in vLLM: ``CachedRequestState`` in
``v1/worker/gpu_input_batch.py``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mrv2lab.protocol import LogitsFunction, SamplingParams


@dataclass(eq=False, slots=True)
class CachedRequestState:
    """The truth about one request. It outlives the request's row: a request that gets no token in a step is evicted
    from the batch and comes back from here.

    ``output_token_ids`` is one list for life, shared with :class:`InputBatch`; under async scheduling its last entries
    are -1 until the token is known on the host. ``block_ids`` holds a growing list for each KV-cache group.
    ``num_computed_tokens`` is the scheduler's value before the present step. ``generator`` lives on the device and only
    where the user gave a seed; it keeps its state over eviction and preemption. ``processors`` are its custom
    functions, with the numbers by which queued work finds them.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    seed_given: bool
    generator: torch.Generator | None
    block_ids: list[list[int]]
    num_computed_tokens: int
    output_token_ids: list[int] = field(default_factory=list)
    stop_token_ids: tuple[int, ...] = ()
    processors: tuple[tuple[int, LogitsFunction], ...] = ()
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs, placeholders counted in."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    def get_token_id(self, i: int) -> int:
        """Token ``i`` of the request, counted from 0; -1 for a placeholder and for what is past the end."""
        if i < self.num_prompt_tokens:
            return self.prompt_token_ids[i]
        i -= self.num_prompt_tokens
        return self.output_token_ids[i] if i < len(self.output_token_ids) else -1
