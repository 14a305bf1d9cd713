"""Custom processors: functions of the user's, one request at a time, that fail alone. Counterpart in vLLM:
``v1/worker/gpu/sample/logits_processor/``, whose processors see the whole batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from mrv2lab.ops.output_tokens import output_tokens
from mrv2lab.protocol import LogitsFunction, RequestData
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.sample.stage import Int32, SampleContext


@dataclass(slots=True)
class _Owner:
    """One admission of a request, as queued work sees it."""

    req_id: str
    functions: tuple[LogitsFunction, ...]
    failed: bool = False


class CustomProcessors:
    """A stage of the sampler: calls each request's functions on its logits rows, inside queued work.

    A function gets a copy of the row, which is its own during the call only. If it raises, or returns anything but a
    float32[V] tensor on the same device, the row stays as it was before the request's functions, they are not called
    again, and :meth:`take_errors` has the reason once the step's output is there. ``output_token_ids`` has the length
    that the host expects, which is exact unless drafts of an earlier step are unverified when this one is scheduled.
    """

    def __init__(self, rt: Runtime, transfers: TransferPolicy, *, max_num_reqs: int, vocab_size: int) -> None:
        self.rt = rt
        self._transfers = transfers
        self._vocab_size = vocab_size
        self._row: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None
        self._starts = transfers.upload("custom.starts", 64, torch.int32)
        self._rows = transfers.upload("custom.rows", 64, torch.int32)
        # [R] int64: who owns the row; 0 = a request without processors
        self._keys = np.zeros(max_num_reqs, np.int64)
        self._last_key = 0
        self._gone: list[int] = []
        """Owners whose row has a new one: forgotten in stream order, since queued work may still need them."""
        self._owners: dict[int, _Owner] = {}
        self._lock = threading.Lock()
        self._errors: dict[str, tuple[int, str]] = {}
        """Request -> the step in which it failed, and the reason."""
        rt.register("custom.call", self._call)
        rt.register("custom.forget", self._forget)

    def add_request(self, row: int, request: RequestData) -> None:
        """See :meth:`Stage.add_request`."""
        if self._keys[row]:
            self._gone.append(int(self._keys[row]))
        self._keys[row] = 0
        if request.processors:
            self._last_key += 1
            self._keys[row] = self._last_key
            self._owners[self._last_key] = _Owner(request.req_id, request.processors)

    def apply_staged_writes(self) -> None:
        """See :meth:`Stage.apply_staged_writes`."""
        for key in self._gone:
            self.rt.run("custom.forget", key)
        self._gone.clear()

    def reset(self) -> None:
        """See :meth:`Stage.reset`."""
        self._keys.fill(0)
        self._gone.clear()
        self._owners.clear()
        with self._lock:
            self._errors.clear()

    def used(self, rows: Int32) -> bool:
        """See :meth:`Stage.used`."""
        return bool(self._owners) and bool(self._keys[rows].any())

    def apply(self, logits: torch.Tensor, context: SampleContext) -> None:
        """See :meth:`Stage.apply`. Rows whose prefill does not end in this step are skipped: nothing samples them."""
        keys, rows, starts = self._plan(context)
        if not len(rows):
            return
        row, tokens = self._buffers(int(starts[-1]))
        batch, states = context.batch, context.states
        with self._transfers.prepare():
            starts_gpu, rows_gpu = self._starts.send(starts), self._rows.send(rows)
        output_tokens(
            self.rt,
            tokens,
            starts_gpu,
            rows_gpu,
            batch.expanded_idx_mapping,
            context.local_pos,
            batch.logits_indices,
            batch.input_ids,
            states.all_token_ids.gpu,
            states.prompt_len.gpu,
            int(np.diff(starts).max()),
        )
        for i, (key, at) in enumerate(zip(keys.tolist(), rows.tolist(), strict=True)):
            generated, one = tokens[int(starts[i]) : int(starts[i + 1])], logits[at]
            self.rt.run("custom.call", key, batch.step, generated, one, row, reads=(generated,), writes=(one, row))

    def _plan(self, context: SampleContext) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], Int32, Int32]:
        """Of the logits rows with processors: owners [m], the rows [m], where their generated tokens lie [m + 1]."""
        host, states = context.batch.host, context.states
        logits_rows = host.num_draft_tokens + 1
        done = host.seq_lens_upper_bound >= states.prefill_len.np[host.rows]
        keys = np.repeat(np.where(done, self._keys[host.rows], 0), logits_rows)
        rows = np.flatnonzero(keys).astype(np.int32)
        local_pos = np.arange(len(keys)) - np.repeat(np.cumsum(logits_rows) - logits_rows, logits_rows)
        known = np.repeat(host.seq_lens_upper_bound - host.num_draft_tokens, logits_rows) + local_pos
        generated = known - np.repeat(states.prompt_len.np[host.rows], logits_rows)
        return keys[rows], rows, np.cumsum([0, *generated[rows]], dtype=np.int32)

    def _buffers(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A scratch row [V] and room for ``tokens``: allocated by the first user, doubled where outputs need more."""
        if self._row is None:
            self._row = self.rt.zeros(self._vocab_size, torch.float32, name="custom.row")
        if self._tokens is None or self._tokens.shape[0] < tokens:
            self._tokens = self.rt.zeros(1 << max(tokens, 1024).bit_length(), torch.int32, name="custom.tokens")
        return self._row, self._tokens

    # -- queued work ---------------------------------------------------------------------------------------------------

    def _call(self, key: int, step: int, generated: torch.Tensor, logits: torch.Tensor, row: torch.Tensor) -> None:
        owner = self._owners.get(key)
        if owner is None or owner.failed:
            return
        made = row.copy_(logits)
        for function in owner.functions:
            try:
                made = _checked(function(generated, made), logits)
            except Exception as error:
                owner.failed = True
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                name = getattr(function, "__qualname__", type(function).__qualname__)
                with self._lock:
                    self._errors[owner.req_id] = step, f"custom processor {name} failed: {reason}"
                return
        logits.copy_(made)

    def _forget(self, key: int) -> None:
        self._owners.pop(key, None)

    # -- for the output ------------------------------------------------------------------------------------------------

    def take_errors(self, req_ids: Iterable[str], step: int | None = None) -> dict[str, str]:
        """The reasons of those of ``req_ids`` that failed up to ``step`` since they were asked for last. From any
        thread, once the step's work is done; every output asks for its whole batch, so none stays behind. A device that
        is ahead may have met a later step's failure already: that is the later output's."""
        with self._lock:
            if not self._errors:
                return {}
            found = [one for one in req_ids if one in self._errors and (step is None or self._errors[one][0] <= step)]
            return {req_id: self._errors.pop(req_id)[1] for req_id in found}


def _checked(made: object, like: torch.Tensor) -> torch.Tensor:
    """``made`` if it can replace the row ``like``; raises ``TypeError`` saying what it is instead."""
    if not isinstance(made, torch.Tensor):
        raise TypeError(f"it returned {type(made).__name__}, not a tensor float32[{len(like)}]")
    if made.dtype != torch.float32 or made.shape != like.shape or made.device != like.device:
        raise TypeError(
            f"it returned {made.dtype}{list(made.shape)} on {made.device}, not torch.float32{list(like.shape)} on "
            f"{like.device}"
        )
    return made
