"""What a step brings back besides tokens: logprobs, NaN counts, prompt logprobs, errors. A batch that asks for none of
it launches nothing here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from mrv2lab.config import EngineConfig
from mrv2lab.protocol import Model
from mrv2lab.runner_v1.async_output import Extras, Slot
from mrv2lab.runner_v1.logprobs import NONE, count_nans, gather_logprobs
from mrv2lab.runner_v1.prompt_logprobs import PromptLogprobs
from mrv2lab.runner_v1.sampler import Sampler
from mrv2lab.runtime.base import Runtime

if TYPE_CHECKING:
    from mrv2lab.runner_v1.cached_request import CachedRequestState
    from mrv2lab.runner_v1.persistent_batch import InputBatch
    from mrv2lab.runner_v1.prepare import StepBatch


class StepExtras:
    """Queues them behind the sampler, and says what the step's output is to read."""

    def __init__(self, config: EngineConfig, rt: Runtime, sampler: Sampler) -> None:
        scheduler = config.scheduler
        self.rt = rt
        self.sampler = sampler
        self._counts_nans = config.runner.count_nans
        self._mode = config.runner.logprobs_mode
        sampler.keeps_shape = self._mode.startswith("processed")
        self.prompts = PromptLogprobs(
            rt,
            vocab_size=config.model.vocab_size,
            max_num_tokens=scheduler.max_num_batched_tokens,
            max_num_logits=min(scheduler.max_num_reqs, scheduler.max_num_batched_tokens),
        )
        rt.register("v1.logprobs", gather_logprobs)
        rt.register("v1.num_nans", count_nans)

    def launch(self, slot: Slot, sampled: torch.Tensor, logits: torch.Tensor, batch: InputBatch) -> Extras:
        """Queue what the batch asks for of ``sampled`` int64[r, 1], from the raw ``logits`` [r, V]."""
        metadata, launch = batch.sampling_metadata, self.sampler.stages.custom_launch
        if self._counts_nans:
            counts = slot.num_nans[: len(logits)]
            self.rt.run("v1.num_nans", counts, logits, reads=(logits,), writes=(counts,))
        if metadata is None:
            return Extras(counts_nans=self._counts_nans)
        return Extras(
            num_logprobs=self._logprobs(slot, sampled, logits, metadata.num_logprobs),
            counts_nans=self._counts_nans,
            errors=None if launch is None else partial(self.sampler.stages.custom.take_errors, launch),
            repairs=metadata.reads_output_ids,
        )

    def _logprobs(
        self, slot: Slot, sampled: torch.Tensor, logits: torch.Tensor, wanted: Mapping[int, int]
    ) -> tuple[int, ...] | None:
        if not wanted:
            return None
        rows = len(logits)
        if self._mode.startswith("processed"):
            assert self.sampler.processed is not None
            logits = self.sampler.processed
        made = slot.logprobs.reserve(rows, 1 + max(wanted.values()))
        tokens = sampled.view(-1)
        logarithms = self._mode.endswith("logprobs")
        self.rt.run("v1.logprobs", *made, logits, tokens, logarithms, reads=(logits, tokens), writes=made)
        return tuple(wanted.get(row, NONE) for row in range(rows))

    def launch_prompts(
        self, requests: Mapping[str, CachedRequestState], rows: Mapping[str, int], batch: StepBatch, model: Model
    ) -> list[str]:
        """Queue the step's chunks of prompts; the requests whose prompt they complete."""
        return self.prompts.launch(requests, rows, batch, model, self._mode.endswith("logprobs"))

    def collect_prompts(self, completed: list[str], extras: Extras) -> Extras:
        """``extras`` with the completed prompts; waits for the device if there are any."""
        return replace(extras, prompt_logprobs=self.prompts.collect(completed)) if completed else extras
