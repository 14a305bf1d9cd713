"""Names of step ranges: what vLLM, SGLang, torch.profiler and this project write above a step, taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

SOURCES: tuple[str, ...] = ("vllm", "sglang", "mrv2lab", "ProfilerStep")
"""Who names steps, the most telling first: where a file has several, the first of these is used."""


@dataclass(frozen=True)
class StepName:
    """What a step's name says; None: it does not say."""

    source: str
    """One of :data:`SOURCES`."""
    number: int | None = None
    """The step's own number. vLLM and SGLang number nothing."""
    context_requests: int | None = None
    """Requests in prefill."""
    context_tokens: int | None = None
    generation_requests: int | None = None
    """Requests in decode."""
    generation_tokens: int | None = None
    kind: str = "unknown"
    """``prefill``, ``decode``, ``mixed`` or ``unknown``."""
    requests: int | None = None
    """Of both halves together, where only that is said; else it is their sum."""
    tokens: int | None = None


class Batch(NamedTuple):
    """Requests and tokens of a step, in prefill and in decode; vLLM calls them context and generation."""

    context_requests: int
    context_tokens: int
    generation_requests: int
    generation_tokens: int

    @property
    def kind(self) -> str:
        """``prefill``, ``decode``, ``mixed``; ``unknown`` of a step without requests."""
        return _kind(self.context_requests, self.generation_requests)

    def step_name(self, source: str, number: int | None) -> StepName:
        """What is known of a step with this batch."""
        return StepName(source, number, *self, self.kind)


# No pattern takes a number that int64 does not hold: it is none.
# vLLM's worker: requests and tokens of both halves. Forks put the step's tokens in front and, in the parentheses, sums
# over requests: 888_788544 (tokens, their squares) or sq8155sk8430.. (query lengths, key lengths, ..).
_VLLM = re.compile(r"execute_(?:\d+_)?context_(\d{1,18})\(([^()]*)\)_generation_(\d{1,18})\(([^()]*)\)")
_VLLM_TOKENS = re.compile(r"(?:sq)?(\d{1,18})(?:_\d+)?(?:s[qk].*)?")
# vLLM before that: a cached request may be in either half.
_VLLM_NEW_CACHED = re.compile(r"execute_new_(\d{1,18})_cached_(\d{1,18})")
_SGLANG = re.compile(r"step\[([A-Z_]+)((?: \w+=\w+)*)\]")
_NUMBERED = {
    "mrv2lab": re.compile(r"mrv2lab\.step#(\d{1,18})"),
    "ProfilerStep": re.compile(r"ProfilerStep#(\d{1,18})"),
}
# Ours, within the step's own range: that one opens before there is a schedule.
_BATCH = re.compile(r"mrv2lab\.execute#(\d{1,18})_context_(\d{1,18})\((\d{1,18})\)_generation_(\d{1,18})\((\d{1,18})\)")


@lru_cache(maxsize=65536)
def parse_step(name: str) -> StepName | None:
    """The parts of a step's name; None: ``name`` is no step's."""
    if match := _VLLM.fullmatch(name):
        context, generation = int(match[1]), int(match[3])
        return StepName(
            "vllm",
            None,
            context,
            _vllm_tokens(match[2]),
            generation,
            _vllm_tokens(match[4]),
            _kind(context, generation),
        )
    if match := _VLLM_NEW_CACHED.fullmatch(name):
        new, cached = int(match[1]), int(match[2])
        if new and not cached:
            return StepName("vllm", context_requests=new, generation_requests=0, generation_tokens=0, kind="prefill")
        return StepName("vllm")
    if match := _SGLANG.fullmatch(name):
        return _sglang(match[1], dict(part.split("=") for part in match[2].split()))
    for source, pattern in _NUMBERED.items():
        if match := pattern.fullmatch(name):
            return StepName(source, int(match[1]))
    return None


def batch_range(number: int, batch: Batch) -> str:
    """Name of the range around what the runner does in step ``number``: vLLM's, and the number that vLLM's lacks."""
    context, context_tokens, generation, generation_tokens = batch
    return f"mrv2lab.execute#{number}_context_{context}({context_tokens})_generation_{generation}({generation_tokens})"


@lru_cache(maxsize=65536)
def parse_batch(name: str) -> tuple[int, Batch] | None:
    """Step and batch in a name of :func:`batch_range`; None: it is none."""
    match = _BATCH.fullmatch(name)
    return (int(match[1]), Batch(*(int(match[group]) for group in range(2, 6)))) if match else None


def names_step(name: str) -> bool:
    """Whether a range is named after one step: it is in no other step, nor in another run."""
    return parse_step(name) is not None or parse_batch(name) is not None


def _kind(context: int, generation: int) -> str:
    if context and generation:
        return "mixed"
    return "prefill" if context else "decode" if generation else "unknown"


def _vllm_tokens(text: str) -> int | None:
    match = _VLLM_TOKENS.fullmatch(text)
    return int(match[1]) if match else None


def _sglang(mode: str, facts: dict[str, str]) -> StepName:
    """``step[EXTEND bs=1 toks=107]``, ``step[DECODE bs=4]``, ``step[MIXED bs=2]``: of a mixed batch, or of a mode of
    speculative decoding, only the sum is in the name."""
    size, tokens = _number(facts.get("bs")), _number(facts.get("toks"))
    if mode == "EXTEND":
        return StepName("sglang", None, size, tokens, 0, 0, "prefill")
    if mode == "DECODE":
        return StepName("sglang", None, 0, 0, size, tokens, "decode")
    return StepName("sglang", kind="mixed" if mode == "MIXED" else "unknown", requests=size, tokens=tokens)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) <= 18 else None
