"""The peers of the sampler's benchmark that come as packages: torch's own ways, and FlashInfer's sampler.

vLLM's kernels are in ``vllm_kernels``. A peer that is not here raises :class:`Absent` with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from mrv2lab.bench.sampler_batch import LOGPROBS, MIN_P, Entrant, SamplerBatch
from mrv2lab.runner_v1.penalties import apply_penalties


class Absent(RuntimeError):
    """A peer cannot be run here; the message says why."""


def torch_ways(b: SamplerBatch) -> list[Entrant]:
    """What one writes without kernels of one's own. Ties and rounding are torch's."""
    k = min(LOGPROBS, b.vocab)
    k_each, p_each = b.top_k.long().unsqueeze(1), b.top_p.unsqueeze(1)

    def multinomial() -> torch.Tensor:
        return torch.multinomial(torch.softmax(b.logits.float(), -1), 1)

    def race() -> torch.Tensor:
        probs = torch.softmax(b.logits, -1, dtype=torch.float32)
        return probs.div_(torch.empty_like(probs).exponential_()).argmax(-1)

    def sort(with_k: bool) -> torch.Tensor:
        values, order = b.logits.sort(dim=-1)
        if with_k:
            least = values.gather(1, b.vocab - k_each)
            values.masked_fill_(values < least, float("-inf"))
        dropped = values.softmax(dim=-1, dtype=torch.float32).cumsum(dim=-1) <= 1 - p_each
        dropped[:, -1] = False
        return values.masked_fill_(dropped, float("-inf")).scatter(-1, order, values)

    def min_p() -> torch.Tensor:
        probs = torch.softmax(b.work, -1, dtype=torch.float32)
        return b.work.masked_fill_(probs < MIN_P * probs.amax(-1, keepdim=True), float("-inf"))

    def logprobs() -> tuple[torch.Tensor, ...]:
        everything = torch.log_softmax(b.logits, -1, dtype=torch.float32)
        own = everything.gather(-1, b.chosen.unsqueeze(1))
        values, ids = everything.topk(k, dim=-1)
        return values, ids, own, (everything >= own).sum(-1)

    entrants = [
        Entrant("greedy", "torch argmax", lambda: torch.argmax(b.logits, -1)),
        Entrant("gumbel", "torch softmax + multinomial", multinomial),
        Entrant("gumbel", "torch softmax + exponential race", race),
        Entrant("topk_topp", "torch sort", lambda: sort(True)),
        Entrant("top_p", "torch sort", lambda: sort(False)),
        Entrant("min_p", "torch softmax + masked_fill", min_p, b.restore),
        Entrant("logprobs", "torch log_softmax + topk + rank", logprobs),
    ]
    if b.dtype == torch.float32:
        recount: Callable[[], None] = lambda: apply_penalties(b.work, b.outputs, b.prompts, *b.penalties)  # noqa: E731
        entrants.append(Entrant("penalties", "torch recount (V1's, tokens on the device already)", recount, b.restore))
    return entrants


def flashinfer_ways(b: SamplerBatch) -> list[Entrant]:
    """FlashInfer's sampler. Its masks and draws are one call, so of top-k, top-p and min-p these rows hold the draw
    too, and their probabilities' softmax. Raises :class:`Absent`."""
    if b.device.type != "cuda":
        raise Absent("flashinfer runs on an NVIDIA GPU only")
    try:
        sampling: Any = importlib.import_module("flashinfer.sampling")
    except Exception as error:  # its import may fail in many ways
        raise Absent(f"flashinfer.sampling: {type(error).__name__}: {error}") from error

    def probs() -> torch.Tensor:
        return torch.softmax(b.logits, -1, dtype=torch.float32)

    return [
        Entrant("gumbel", "flashinfer sampling_from_logits", lambda: sampling.sampling_from_logits(b.logits.float())),
        Entrant("topk_topp", "flashinfer top_k_top_p_sampling_from_logits (and draws)",
                lambda: sampling.top_k_top_p_sampling_from_logits(b.logits.float(), b.top_k, b.top_p)),
        Entrant("top_p", "flashinfer top_p_sampling_from_probs (and draws)",
                lambda: sampling.top_p_sampling_from_probs(probs(), b.top_p)),
        Entrant("min_p", "flashinfer min_p_sampling_from_probs (and draws)",
                lambda: sampling.min_p_sampling_from_probs(probs(), b.min_p)),
    ]  # fmt: skip
