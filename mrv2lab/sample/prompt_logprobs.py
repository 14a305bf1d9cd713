"""Log-probabilities of prompt tokens, chunk by chunk. Counterpart in vLLM: ``sample/prompt_logprob.py``.

Logits exist only for the tokens that are sampled from, so those of a prompt are computed again from the hidden states,
at most ``chunk`` rows at a time, also inside one prompt: that bounds the device's memory. Each step's part goes into
the step's own output, and the host puts the parts of a chunked prefill together; nobody waits.

A step's way: ``plan`` (inside the transfer policy's ``prepare``: it uploads) -> ``launch`` behind the forward and in
front of the step's own logits, whose buffer it uses -> ``copy`` on the copy stream -> ``collect`` behind its event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mrv2lab.protocol import Logprobs, Model, RequestData
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.sample.token_logprobs import LogprobsBuffers, TokenLogprobs, widen
from mrv2lab.state.input_batch import HostBatch
from mrv2lab.state.request_state import RequestState

Int32 = np.ndarray[Any, np.dtype[np.int32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class PromptProgress:
    """One admission of one request: what is to be emitted, and the parts that have arrived."""

    req_id: str
    # [prompt_len - 1] int64: row i of the prompt predicts token i + 1
    targets: Int64
    top: int
    next_row: int = 0
    """The first row that no step has computed."""
    parts: list[tuple[int, Logprobs]] = field(default_factory=list)
    """(first row, rows), as they arrived."""
    has_last: bool = False

    def add(self, first: int, rows: Logprobs, last: bool) -> Logprobs | None:
        """Take a part; all rows in order once none is missing. The last part, of the step that completes the prompt,
        may be empty: without waiting for it, a request preempted right before would be served twice."""
        self.parts.append((first, rows))
        self.has_last |= last
        if not self.has_last or sum(len(part.ranks) for _, part in self.parts) < len(self.targets):
            return None
        parts = [part for _, part in sorted(self.parts, key=lambda part: part[0])]
        self.parts = []
        return Logprobs(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompt rows of one step: m in all, request after request."""

    # (request, its first row in this step, how many, whether this step completes the prompt)
    parts: list[tuple[PromptProgress, int, int, bool]]
    # [m] int32: what was asked for
    asked: Int32
    # [m] bool: whose whole row goes to the host
    whole: np.ndarray[Any, np.dtype[np.bool_]]
    columns: int
    # [m] int64, device: rows of the hidden states, and the tokens that they should have predicted
    indices: torch.Tensor
    targets: torch.Tensor
    # [m] int32, device: tokens to order, and, chunk by chunk, places within the chunk of its whole rows (w of m used)
    tops: torch.Tensor
    whole_places: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepPromptLogprobs:
    """One step's part on its way."""

    plan: PromptPlan
    buffers: LogprobsBuffers
    # [w, V] float32, written by the kernel itself
    whole: torch.Tensor | None

    def copy(self) -> None:
        """Queue the copies to the host on the current stream."""
        if len(self.plan.asked):
            self.buffers.copy(len(self.plan.asked), self.plan.columns)

    def collect(self) -> dict[str, Logprobs]:
        """Once the copies are done, in any order of steps: whole results of the requests whose last part this was,
        prompt_len - 1 rows each."""
        plan = self.plan
        ids, values, ranks = self.buffers.read(len(plan.asked), plan.columns)
        by_token = None if self.whole is None else self.whole.numpy()
        row_of = np.cumsum(plan.whole) - 1
        done, start = {}, 0
        for progress, first, count, last in plan.parts:
            at = slice(start, start + count)
            whole: dict[int, Any] = {}
            if by_token is not None:
                whole = {int(i): by_token[row_of[start + i]] for i in np.flatnonzero(plan.whole[at])}
            # widen() makes fresh arrays: the pinned ones serve another step soon.
            rows = widen(ids[at], values[at], ranks[at], np.full(count, progress.top, np.int32), whole, progress.top)
            found = progress.add(first, rows, last)
            if found is not None:
                done[progress.req_id] = found
            start += count
        return done


class PromptLogprobs:
    """Which requests still owe rows, by permanent row. A request that was preempted in mid-prompt starts again; one
    that is resumed with outputs has been served and is skipped, as is one whose result is under way already."""

    def __init__(
        self,
        rt: Runtime,
        transfers: TransferPolicy,
        kernels: TokenLogprobs,
        *,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        chunk: int,
        as_logits: bool = False,
    ) -> None:
        if not 1 <= chunk <= kernels.max_rows:
            raise ValueError(f"chunk must be 1 to {kernels.max_rows}, the rows that the kernels hold; got {chunk}")
        self.rt = rt
        self.kernels = kernels
        self.chunk = chunk
        self.as_logits = as_logits
        self._progress: dict[int, PromptProgress] = {}
        """By row."""
        self._served: set[str] = set()
        """Live requests whose last row was launched."""
        # [R] bool: rows in _progress
        self._owes = np.zeros(max_num_reqs, bool)
        # Two arrays each in one copy
        self._wide = transfers.upload("prompt_logprobs.plan64", 2 * max_num_batched_tokens, torch.int64)
        self._narrow = transfers.upload("prompt_logprobs.plan32", 2 * max_num_batched_tokens, torch.int32)

    def add_request(self, row: int, request: RequestData) -> None:
        """Overwrite ``row``. Raises ``ValueError`` for a prefix hit, which would leave out the first rows."""
        self._drop(row)
        wish, vocab = request.sampling.prompt_logprobs, self.kernels.vocab_size
        resumed = request.prompt_len < len(request.all_token_ids)
        if wish is None or resumed or request.req_id in self._served:
            return
        if request.num_computed_tokens:
            raise ValueError(
                f"request {request.req_id!r} wants prompt logprobs but starts at token {request.num_computed_tokens}; "
                "such a request must take no prefix hit"
            )
        targets = np.array(request.all_token_ids[1 : request.prompt_len], np.int64)
        top = vocab if wish < 0 else min(wish, vocab)
        self._progress[row] = PromptProgress(request.req_id, targets, top)
        self._owes[row] = True

    def remove_request(self, row: int, req_id: str, finished: bool = True) -> None:
        """The request of ``row`` finished, or (``finished`` False) was preempted and may come back."""
        self._drop(row)
        if finished:
            self._served.discard(req_id)

    def _drop(self, row: int) -> None:
        self._progress.pop(row, None)
        self._owes[row] = False

    def reset(self) -> None:
        """Forget every request."""
        self._progress.clear()
        self._served.clear()
        self._owes[:] = False

    def plan(self, host: HostBatch, states: RequestState) -> PromptPlan | None:
        """The rows of this step, uploaded; None if no request of the batch owes any. Call it once a step, behind
        ``gather_host_batch``: it advances the requests' progress."""
        if not self._progress:
            return None
        batch = np.flatnonzero(self._owes[host.rows])
        if not len(batch):
            return None
        parts, indices, targets, asked = [], [], [], []
        for b in batch.tolist():  # only requests that owe rows, a step or a few each
            row = int(host.rows[b])
            progress = self._progress[row]
            first, end = progress.next_row, int(states.num_computed_prefill_tokens[row] + host.num_scheduled_tokens[b])
            if first != states.num_computed_prefill_tokens[row]:
                raise RuntimeError(
                    f"request {progress.req_id!r}: prompt logprobs are at row {first}, the prefill at token "
                    f"{states.num_computed_prefill_tokens[row]}"
                )
            # The row of the prompt's last token predicts the first output: it is not part of the prompt.
            count = min(end, len(progress.targets)) - first
            start = int(host.query_start_loc[b])
            last = end > len(progress.targets)
            parts.append((progress, first, count, last))
            indices.append(np.arange(start, start + count))
            targets.append(progress.targets[first : first + count])
            asked.append(np.full(count, progress.top, np.int32))
            progress.next_row = first + count
            if last:
                self._drop(row)
                self._served.add(progress.req_id)
        return self._upload(parts, np.concatenate(indices), np.concatenate(targets), np.concatenate(asked))

    def _upload(
        self, parts: list[tuple[PromptProgress, int, int, bool]], indices: Int64, targets: Int64, asked: Int32
    ) -> PromptPlan:
        whole = asked > self.kernels.max_top
        tops = np.where(whole, 0, asked)
        m, places = len(asked), np.flatnonzero(whole) % self.chunk
        if m:
            wide = self._wide.send(np.concatenate([indices, targets]))
            narrow = self._narrow.send(np.concatenate([tops, places]).astype(np.int32))
        else:  # prompts of one token, and last chunks of one
            wide, narrow = self._wide.first(0), self._narrow.first(0)
        columns = 1 + int(tops.max(initial=0))
        return PromptPlan(parts, asked, whole, columns, wide[:m], wide[m:], narrow[:m], narrow[m:])

    def launch(self, plan: PromptPlan, buffers: LogprobsBuffers, model: Model) -> StepPromptLogprobs:
        """Queue logits and log-probabilities, chunk by chunk, behind the forward of the step that was planned."""
        m, whole, done = len(plan.asked), None, 0
        if plan.whole.any():
            shape = (int(plan.whole.sum()), self.kernels.vocab_size)
            whole = self.rt.empty(shape, torch.float32, name="prompt_logprobs.whole.tmp", place="pinned")
        ids, values, ranks = buffers.views(m, plan.columns)
        for start in range(0, m, self.chunk):
            end = min(start + self.chunk, m)
            n, part = end - start, slice(start, end)
            logits = model.compute_logits(plan.indices[part], n)
            out, rows = (ids[part], values[part], ranks[part]), self.kernels.rows[:n]
            self.kernels.launch(out, logits, rows, plan.targets[part], plan.tops[part], self.as_logits)
            count = int(plan.whole[part].sum())
            if whole is not None and count:
                places = plan.whole_places[done : done + count]
                self.kernels.launch_rows(whole[done : done + count], logits, rows, places, self.as_logits)
                done += count
        return StepPromptLogprobs(plan, buffers, whole)
