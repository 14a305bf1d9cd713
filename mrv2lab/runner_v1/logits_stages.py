"""The stages between raw logits and the draw, each one launch of plain torch over the whole batch.

Order: allowed ids, bias, min_tokens, penalties, bad words, custom processors, temperature, min-p, top-k and top-p; a
stage that no row uses is not launched. vLLM's V1 has the bias behind bad words, and penalties behind both; here the
order is that of MRV2, so that both runners see the same logits. Counterparts in vLLM: ``v1/sample/sampler.py``,
``v1/sample/logits_processor/builtin.py``, ``v1/sample/ops/bad_words.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mrv2lab.runner_v1.custom import CustomProcessors
from mrv2lab.runner_v1.penalties import OutputTokenIds, apply_penalties
from mrv2lab.runner_v1.sampling_metadata import SamplingMetadata
from mrv2lab.runner_v1.top_k_top_p import apply_top_k_top_p
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import PinnedCopy

if TYPE_CHECKING:
    from mrv2lab.runner_v1.persistent_batch import InputBatch

_INF = float("inf")


class LogitsStages:
    """Queues the stages that a batch needs, on a float32 copy of its logits."""

    def __init__(self, rt: Runtime) -> None:
        self.rt = rt
        self.custom = CustomProcessors(rt)
        self.custom_launch: int | None = None
        """The latest batch's, for :meth:`CustomProcessors.take_errors`."""
        self._outputs = OutputTokenIds(rt)
        fresh = PinnedCopy(rt)
        self._stop_rows = fresh.upload("min_tokens.rows", 1, torch.int64)
        self._stop_ids = fresh.upload("min_tokens.ids", 1, torch.int64)
        self._buffer: torch.Tensor | None = None
        for name, fn in _SEGMENTS.items():
            rt.register(f"v1.sample.{name}", fn)

    def apply(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        metadata: SamplingMetadata,
        discarded: Sequence[int],
        shape: bool,
    ) -> torch.Tensor | None:
        """The processed logits float32[r, V], or None if no stage has anything to do; ``logits`` [r, V] stay.

        ``shape``: whether temperature and cuts are wanted, which change no argmax. The result lies in a buffer that the
        next step writes again.
        """
        self.custom_launch = None
        stops = self._stops(batch, metadata)
        words = _banned(batch, metadata)
        edits = metadata.allowed_token_ids_mask is not None or metadata.logit_bias is not None
        if not (edits or stops or words or metadata.penalties is not None or metadata.processors or shape):
            return None
        x = self._copy(logits, batch)
        if metadata.allowed_token_ids_mask is not None:
            self._run("allowed", x, metadata.allowed_token_ids_mask)
        if metadata.logit_bias is not None:
            self._run("logit_bias", x, *metadata.logit_bias)
        if stops:
            rows, ids, structured = stops
            at = self._stop_rows.send(np.array(rows, np.int64))
            self._run("min_tokens", x, at, self._stop_ids.send(np.array(ids, np.int64)), structured)
        outputs = batch.req_output_token_ids
        if metadata.penalties is not None or metadata.processors:
            sent = self._outputs.send(outputs, batch.vocab_size)
        if metadata.penalties is not None:
            self._run("penalties", x, sent, metadata.prompt_token_ids, *metadata.penalties)
        if words:
            self._run("bad_words", x, *words)
        if metadata.processors:
            self.custom_launch = self.custom.launch(x, metadata.processors, outputs, sent, discarded)
        if shape:
            self._shape(x, batch, metadata)
        return x

    def _shape(self, x: torch.Tensor, batch: InputBatch, metadata: SamplingMetadata) -> None:
        if not batch.all_greedy:  # else the table was never sent
            self._run("temperature", x, batch.temperature.gpu)
        if metadata.min_p is not None:
            self._run("min_p", x, metadata.min_p)
        if metadata.top_k is not None or metadata.top_p is not None:
            self._run("top_k_top_p", x, metadata.top_k, metadata.top_p)

    def _copy(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        if self._buffer is None:  # kept from the first batch that needs it
            shape = (batch.max_num_reqs, batch.vocab_size)
            self._buffer = self.rt.empty(shape, torch.float32, name="processed_logits")
        x = self._buffer[: len(logits)]
        self.rt.run("v1.sample.float32", x, logits, reads=(logits,), writes=(x,))
        return x

    def _run(self, name: str, x: torch.Tensor, *args: Any) -> None:
        tensors = tuple(arg for arg in args if isinstance(arg, torch.Tensor))
        self.rt.run(f"v1.sample.{name}", x, *args, reads=(x, *tensors), writes=(x,))

    def _stops(
        self, batch: InputBatch, metadata: SamplingMetadata
    ) -> tuple[list[int], list[int], tuple[int, ...]] | None:
        """Rows and stop tokens that are held back in this step, and the rows of them that have a grammar."""
        rows: list[int] = []
        ids: list[int] = []
        structured: list[int] = []
        for row, least in metadata.min_tokens.items():
            if len(batch.req_output_token_ids[row] or ()) < least.count:
                rows += [row] * len(least.stop_token_ids)
                ids += least.stop_token_ids
                if least.structured:
                    structured.append(row)
        return (rows, ids, tuple(structured)) if rows else None

    def reset(self) -> None:
        """Forget every request. The queue must be empty."""
        self.custom.reset()
        self.custom_launch = None


def _banned(batch: InputBatch, metadata: SamplingMetadata) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Rows and tokens that would end a bad word: a loop over requests and their words, in Python, as V1's is."""
    rows: list[int] = []
    ids: list[int] = []
    for row, words in metadata.bad_words.items():
        outputs = batch.req_output_token_ids[row] or []
        for *head, last in words:
            if not head or outputs[-len(head) :] == head:
                rows.append(row)
                ids.append(last)
    return (tuple(rows), tuple(ids)) if rows else None


# -- queued work -------------------------------------------------------------------------------------------------------


def clean(logits: torch.Tensor) -> torch.Tensor:
    """float32, with -inf for NaN."""
    return torch.nan_to_num(logits.float(), nan=-_INF, posinf=_INF, neginf=-_INF)


def _float32(x: torch.Tensor, logits: torch.Tensor) -> None:
    x.copy_(clean(logits))


def _allowed(x: torch.Tensor, mask: torch.Tensor) -> None:
    x.masked_fill_(mask[: len(x)], -_INF)


def _logit_bias(x: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    x.index_put_((rows, ids), x[rows, ids] + values)


def _min_tokens(x: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, structured: tuple[int, ...]) -> None:
    before = {row: x[row].clone() for row in structured}
    x.index_put_((rows, ids), torch.full((), -_INF, device=x.device))
    for row, logits in before.items():
        # A grammar that allows only the end is stronger than a least length.
        x[row] = torch.where((x[row] == -_INF).all(), logits, x[row])


def _bad_words(x: torch.Tensor, rows: tuple[int, ...], ids: tuple[int, ...]) -> None:
    for row, token in zip(rows, ids, strict=True):
        x[row, token].fill_(-_INF)  # an assignment of a number would copy it from the host, and wait on CUDA


def scale(x: torch.Tensor, temperature: torch.Tensor) -> None:
    """x float32[r, V] /= temperature float32[R], in place; rows of temperature 0 stay."""
    # From the UVA slot it may lie in, which torch's own operations cannot read in place.
    t = temperature[: len(x)].to(x.device, non_blocking=True)
    x.div_(torch.where(t == 0, 1.0, t).unsqueeze(1))


def _min_p(x: torch.Tensor, min_p: torch.Tensor) -> None:
    """Keep what is at least ``min_p`` float32[r] times as likely as the most likely token."""
    least = min_p[: len(x)].to(x.device, non_blocking=True).unsqueeze(1)
    probs = x.softmax(dim=-1)
    x.masked_fill_(probs < least * probs.amax(dim=-1, keepdim=True), -_INF)


_SEGMENTS: dict[str, Callable[..., None]] = {
    "float32": _float32,
    "allowed": _allowed,
    "logit_bias": _logit_bias,
    "min_tokens": _min_tokens,
    "penalties": apply_penalties,
    "bad_words": _bad_words,
    "temperature": scale,
    "min_p": _min_p,
    "top_k_top_p": apply_top_k_top_p,
}
