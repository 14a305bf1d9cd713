"""Which graph a step replays, and why, as values. Counterpart in vLLM: ``BatchDescriptor`` (``cudagraph_utils.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GraphKind = Literal["full", "piecewise"]


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """A captured shape; exactly one graph (``full``) or one list of graphs (``piecewise``) belongs to it.

    ``full``: everything between the prepared inputs and the hidden states, in one graph, for ``num_reqs`` padded
    requests. ``piecewise``: the segments between attentions, which depend on the token count alone.
    """

    mode: GraphKind
    num_tokens: int
    """Padded tokens of the step."""
    num_reqs: int | None
    """Padded requests; None (piecewise) = attention runs outside the graphs, over the requests there are."""
    query_len: int | None
    """Tokens of every request; None = any lengths that fit."""

    @property
    def kind(self) -> str:
        """What it has in common with those of other sizes, in words."""
        if self.mode == "piecewise":
            return "piecewise"
        if self.query_len is None:
            return "full, any lengths"
        return "full, plain decodes" if self.query_len == 1 else f"full, decodes of {self.query_len} tokens each"

    def __str__(self) -> str:
        if self.mode == "piecewise":
            return f"piecewise graphs of {count(self.num_tokens, 'token')}"
        uniform = "" if self.query_len is None or self.query_len == 1 else f" of {self.query_len} tokens each"
        reqs = count(self.num_reqs or 0, "request")
        return f"full graph of {count(self.num_tokens, 'token')}, {reqs}{uniform}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step does, and one sentence that says why. Made once for each token count, so that a step makes none."""

    descriptor: BatchDescriptor | None
    """The graph to replay; None = eager, and nothing is padded."""
    reason: str

    @property
    def mode(self) -> Literal["full", "piecewise", "eager"]:
        """In a word."""
        return "eager" if self.descriptor is None else self.descriptor.mode

    @property
    def padded_tokens(self) -> int | None:
        """Tokens of the padded step; None = as many as there are."""
        return None if self.descriptor is None else self.descriptor.num_tokens

    @property
    def padded_reqs(self) -> int | None:
        """Requests of the padded attention metadata; None = as many as there are."""
        return None if self.descriptor is None else self.descriptor.num_reqs


def count(n: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
