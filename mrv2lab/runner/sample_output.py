"""What a step brings back beside its tokens: log-probabilities, prompts' too, NaN counts, processors' errors.

Counterpart in vLLM: ``SamplerOutput`` and the tensors of ``AsyncOutput`` in ``v1/worker/gpu/async_utils.py``. A step
whose requests ask for none of it launches nothing and copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mrv2lab.config import RunnerConfig
from mrv2lab.ops.nan_count import nan_count
from mrv2lab.protocol import Logprobs, Model, RequestData
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.sample.logprobs import LogprobsPlan, SampleLogprobs, StepLogprobs
from mrv2lab.sample.prompt_logprobs import PromptLogprobs, PromptPlan, StepPromptLogprobs
from mrv2lab.sample.token_logprobs import LogprobsBuffers, TokenLogprobs
from mrv2lab.state.input_batch import HostBatch, InputBatch
from mrv2lab.state.request_state import RequestState

MAX_CHUNK = 1024
"""Rows of a prompt whose logits are in memory at a time, at most."""


@dataclass(slots=True)
class StepPlan:
    """What one step must bring back; made inside the transfer policy's ``prepare``."""

    logprobs: LogprobsPlan | None
    prompt: PromptPlan | None


@dataclass(slots=True)
class StepExtras:
    """One step's extras on their way to the host."""

    req_ids: list[str]
    step: int
    take_errors: Callable[[Iterable[str], int], dict[str, str]]
    logprobs: StepLogprobs | None = None
    prompt: StepPromptLogprobs | None = None
    # [n] int32, device and pinned
    nans: torch.Tensor | None = None
    nans_host: torch.Tensor | None = None
    # [r + 1] int32: first logits row of each request
    cu_num_logits: np.ndarray[Any, np.dtype[np.int32]] | None = None

    def copy(self, rt: Runtime) -> None:
        """Queue the copies to the host on the current stream."""
        if self.logprobs is not None:
            self.logprobs.copy()
        if self.prompt is not None:
            self.prompt.copy()
        if self.nans is not None and self.nans_host is not None:
            rt.d2h(self.nans_host, self.nans)

    def fields(self, num_sampled: np.ndarray[Any, np.dtype[np.int32]]) -> dict[str, Any]:
        """What :class:`ModelRunnerOutput` has besides tokens, once the copies are done. ``num_sampled`` int32[r]."""
        logprobs: Logprobs | None = self.logprobs.read(num_sampled) if self.logprobs is not None else None
        return {
            "logprobs": logprobs,
            "prompt_logprobs": self.prompt.collect() if self.prompt is not None else {},
            "num_nans": self._nans(),
            "errors": self.take_errors(self.req_ids, self.step),
        }

    def _nans(self) -> dict[str, int]:
        if self.nans_host is None or self.cu_num_logits is None:
            return {}
        counts = np.add.reduceat(self.nans_host.numpy(), self.cu_num_logits[:-1])
        return {self.req_ids[i]: int(counts[i]) for i in np.flatnonzero(counts)}


class SampleOutputs:
    """Plans, launches and buffers of the extras; ``depth`` steps may be in flight."""

    def __init__(
        self,
        rt: Runtime,
        transfers: TransferPolicy,
        config: RunnerConfig,
        *,
        max_num_reqs: int,
        max_num_logits: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        depth: int,
        take_errors: Callable[[Iterable[str], int], dict[str, str]],
    ) -> None:
        self.rt = rt
        self.count_nans = config.count_nans
        self._take_errors = take_errors
        self._rows, self._tokens, self._depth = max_num_logits, max_num_batched_tokens, depth
        kernels = TokenLogprobs(rt, max_rows=max_num_logits, vocab_size=vocab_size)
        self.logprobs = SampleLogprobs(
            rt,
            transfers,
            kernels,
            max_num_reqs=max_num_reqs,
            max_num_logits=max_num_logits,
            mode=config.logprobs_mode,
        )
        self.prompt = PromptLogprobs(
            rt,
            transfers,
            kernels,
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunk=min(MAX_CHUNK, max_num_logits),
            as_logits=config.logprobs_mode.endswith("logits"),
        )
        self._max_top = kernels.max_top
        # By slot, allocated by the first step that needs them
        self._logprobs_buffers: list[LogprobsBuffers | None] = [None] * depth
        self._prompt_buffers: list[LogprobsBuffers | None] = [None] * depth
        self._nans: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * depth
        self._turn = 0
        self._plain_rows: np.ndarray[Any, np.dtype[np.int32]] | None = None
        """The latest batch of which nobody wants anything, while nobody came: steps in a row have the same array."""

    def add_request(self, row: int, request: RequestData) -> None:
        """Overwrite ``row``."""
        self._plain_rows = None
        self.logprobs.add_request(row, request)
        self.prompt.add_request(row, request)

    def remove_request(self, row: int, req_id: str, finished: bool) -> None:
        """The request of ``row`` finished, or was preempted and may come back."""
        self.prompt.remove_request(row, req_id, finished)

    def reset(self) -> None:
        """Forget every request."""
        self._plain_rows = None
        self.prompt.reset()

    def plan(self, host: HostBatch, states: RequestState) -> StepPlan:
        """Which rows of the step are wanted, uploaded."""
        if host.rows is self._plain_rows:
            return StepPlan(None, None)
        plan = StepPlan(self.logprobs.plan(host), self.prompt.plan(host, states))
        if plan.logprobs is None and plan.prompt is None and not host.rows.flags.writeable:
            self._plain_rows = host.rows
        return plan

    def begin(self, plan: StepPlan, batch: InputBatch, model: Model) -> StepExtras:
        """Behind the forward and in front of the step's own logits, whose buffer the prompts' rows use."""
        self._turn = (self._turn + 1) % self._depth
        extras = StepExtras(batch.host.req_ids, batch.step, self._take_errors)
        if plan.prompt is not None:
            buffers = self._buffers(self._prompt_buffers, "prompt_logprobs", self._tokens)
            extras.prompt = self.prompt.launch(plan.prompt, buffers, model)
        return extras

    def count(self, extras: StepExtras, logits: torch.Tensor, batch: InputBatch) -> None:
        """Count the NaNs of raw ``logits`` [n, V], if the engine was asked to."""
        if not self.count_nans:
            return
        pair = self._nans[self._turn]
        if pair is None:
            name = f"num_nans.{self._turn}"
            host = self.rt.empty(self._rows, torch.int32, name=f"{name}.host", place="pinned")
            pair = self._nans[self._turn] = self.rt.zeros(self._rows, torch.int32, name=name), host
        n = logits.shape[0]
        extras.nans, extras.nans_host = pair[0][:n], pair[1][:n]
        extras.cu_num_logits = np.cumsum([0, *(batch.host.num_draft_tokens + 1)], dtype=np.int32)
        nan_count(self.rt, extras.nans, logits, batch.expanded_idx_mapping)

    def finish(
        self, extras: StepExtras, plan: StepPlan, raw: torch.Tensor, processed: torch.Tensor, sampled: torch.Tensor
    ) -> None:
        """Log-probabilities of ``sampled`` int64[n], once nobody changes it any more."""
        if plan.logprobs is None:
            return
        buffers = self._buffers(self._logprobs_buffers, "logprobs", self._rows)
        logits = processed if self.logprobs.processed else raw
        extras.logprobs = self.logprobs.launch(plan.logprobs, buffers, logits, sampled)

    def _buffers(self, slots: list[LogprobsBuffers | None], name: str, rows: int) -> LogprobsBuffers:
        found = slots[self._turn]
        if found is None:
            name = f"{name}.{self._turn}"
            found = slots[self._turn] = LogprobsBuffers(self.rt, name, max_rows=rows, max_top=self._max_top)
        return found
