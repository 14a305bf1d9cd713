"""Log-probabilities of the prompt's tokens: the logits of every token of a chunk, whole, and a wait at the end.

Counterpart in vLLM: ``GPUModelRunner._get_prompt_logprobs_dict`` in ``v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mrv2lab.protocol import Logprobs, Model
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import PinnedCopy

if TYPE_CHECKING:
    from mrv2lab.runner_v1.cached_request import CachedRequestState
    from mrv2lab.runner_v1.prepare import StepBatch


@dataclass(eq=False, slots=True)
class PromptProgress:
    """One request's pinned results, m = prompt_len - 1 rows, filled chunk by chunk. A prompt that is preempted half way
    begins anew and writes the same rows again."""

    # [m, 1 + k] int32
    ids: torch.Tensor
    # [m, 1 + k] float32
    values: torch.Tensor
    # [m] int32
    ranks: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids, values, ranks."""
        return self.ids, self.values, self.ranks

    def result(self) -> Logprobs:
        """A copy of everything, after a wait."""
        ids, values, ranks = (part.numpy().copy() for part in self.parts)
        return Logprobs(ids, values, ranks)


class PromptLogprobs:
    """Queues the log-probabilities of each chunk, and hands out those of prompts that are complete."""

    def __init__(self, rt: Runtime, *, vocab_size: int, max_num_tokens: int, max_num_logits: int) -> None:
        self.rt = rt
        self.vocab_size = vocab_size
        self.max_num_logits = max_num_logits
        """Rows that the model computes in one call."""
        self._progress: dict[str, PromptProgress] = {}
        """By request, of those that wait for theirs: a request that is preempted keeps it."""
        fresh = PinnedCopy(rt)
        self._indices = fresh.upload("prompt_logprobs.indices", max_num_tokens, torch.int64)
        self._tokens = fresh.upload("prompt_logprobs.tokens", max_num_tokens, torch.int64)
        rt.register("v1.prompt_logits", _collect)

    def add_request(self, req_id: str, prompt_len: int, wanted: int | None) -> None:
        """``wanted``: how many most likely tokens at each of its tokens; -1 = the whole vocabulary, None = nothing."""
        if wanted is None:
            return
        width = 1 + (self.vocab_size if wanted == -1 else min(wanted, self.vocab_size))
        rows = prompt_len - 1

        def pinned(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return self.rt.empty(shape, dtype, name=f"prompt_logprobs.{name}.host", place="pinned")

        self._progress[req_id] = PromptProgress(
            pinned("ids", (rows, width), torch.int32),
            pinned("values", (rows, width), torch.float32),
            pinned("ranks", (rows,), torch.int32),
        )

    def remove_request(self, req_id: str) -> None:
        """It is over, perhaps before its prompt was."""
        self._progress.pop(req_id, None)

    def launch(
        self,
        requests: Mapping[str, CachedRequestState],
        rows: Mapping[str, int],
        batch: StepBatch,
        model: Model,
        logarithms: bool,
    ) -> list[str]:
        """Queue this step's chunks, in front of the step's own logits, whose buffer the model shares with them; the
        requests whose prompt they complete, for :meth:`collect`. ``rows`` are the batch's rows by request."""
        completed = []
        for req_id, progress in self._progress.items():
            row = rows.get(req_id)
            if row is None:
                continue
            state = requests[req_id]
            first, count = state.num_computed_tokens, int(batch.host.num_scheduled_tokens[row])
            left = state.num_prompt_tokens - 1 - first
            if count > left:
                # The last prompt token predicts the first output.
                count = left
                completed.append(req_id)
            if count > 0:
                targets = state.prompt_token_ids[first + 1 : first + 1 + count]
                self._chunk(progress, int(batch.host.query_start_loc[row]), first, targets, model, logarithms)
        return completed

    def _chunk(
        self, progress: PromptProgress, start: int, first: int, targets: list[int], model: Model, logarithms: bool
    ) -> None:
        """The step's tokens from ``start`` on, the prompt's from ``first`` on, which ``targets`` follow."""
        rt, rows = self.rt, len(targets)
        width = progress.ids.shape[1]
        indices = self._indices.send(np.arange(start, start + rows, dtype=np.int64))
        tokens = self._tokens.send(np.array(targets, np.int64))
        whole = rt.empty((rows, self.vocab_size), torch.float32, name="prompt_logits")
        for begin in range(0, rows, self.max_num_logits):
            part = whole[begin : begin + self.max_num_logits]
            logits = model.compute_logits(indices[begin : begin + len(part)], len(part))
            rt.run("v1.prompt_logits", part, logits, reads=(logits,), writes=(part,))
        made = (
            rt.empty((rows, width), torch.int32, name="prompt_logprobs.ids"),
            rt.empty((rows, width), torch.float32, name="prompt_logprobs.values"),
            rt.empty((rows,), torch.int32, name="prompt_logprobs.ranks"),
        )
        rt.run("v1.logprobs", *made, whole, tokens, logarithms, reads=(whole, tokens), writes=made)
        for host, device in zip(progress.parts, made, strict=True):
            rt.d2h(host[first : first + rows], device)

    def collect(self, completed: list[str]) -> dict[str, Logprobs]:
        """The whole prompts' results, once each. As V1 does, the host waits for all of the device here."""
        if not completed:
            return {}
        self.rt.synchronize()
        return {req_id: self._progress.pop(req_id).result() for req_id in completed}

    def reset(self) -> None:
        """Forget every request."""
        self._progress.clear()


def _collect(whole: torch.Tensor, logits: Any) -> None:
    whole.copy_(logits)
