"""The shapes as a table: (requests, tokens, longest query) -> a graph, or eager, with the reason.

Every answer is made beforehand, one a token count, so that a step only indexes a list. Counterpart in vLLM:
``CudaGraphManager._init_candidates`` and ``dispatch`` of ``cudagraph_utils.py``.
"""

from __future__ import annotations

from mrv2lab.config import GraphConfig, GraphMode, SchedulerConfig
from mrv2lab.graphs.descriptor import BatchDescriptor, Decision, count
from mrv2lab.graphs.sizes import capture_sizes


class DispatchTable:
    """See the module's docstring.

    ``decode_query_len`` is the tokens of a plain decode (1 + drafts). ``full_graphs`` is the attention backend's
    (:class:`mrv2lab.attention.AttentionBackend`), ``backend`` its name for reasons.
    """

    def __init__(
        self,
        graphs: GraphConfig,
        scheduler: SchedulerConfig,
        *,
        full_graphs: bool = True,
        backend: str = "attention",
        decode_query_len: int = 1,
    ) -> None:
        if decode_query_len < 1:
            raise ValueError(f"decode_query_len must be at least 1, got {decode_query_len}")
        self.decode_query_len = decode_query_len
        self.max_num_reqs = scheduler.max_num_reqs
        self.asked: GraphMode = graphs.cudagraph_mode
        self.mode, self.downgrade = resolve_mode(graphs.cudagraph_mode, full_graphs, backend)
        """The mode that is built, and why it is not the one that was asked for ('' where it is)."""
        self.sizes = capture_sizes(graphs, scheduler, decode_query_len) if self.mode != "none" else ()
        self._candidates = self._make_candidates()
        self._dropped: dict[BatchDescriptor, str] = {}
        self._late: dict[int, Decision] = {}
        self._none = Decision(None, self.downgrade or "cudagraph_mode is 'none'")
        self._build()

    # -- candidates ----------------------------------------------------------------------------------------------------

    def candidates(self) -> tuple[BatchDescriptor, ...]:
        """What is to be captured, in the order of capture: piecewise before full (any lengths, then decodes), the
        largest first, so that the smaller ones reuse its memory."""
        return self._candidates

    def _make_candidates(self) -> tuple[BatchDescriptor, ...]:
        reqs, query_len, mode = self.max_num_reqs, self.decode_query_len, self.mode
        mixed: list[BatchDescriptor] = []
        if mode in ("piecewise", "full_and_piecewise"):
            mixed = [BatchDescriptor("piecewise", size, None, None) for size in self.sizes]
        elif mode == "full":
            mixed = [BatchDescriptor("full", size, min(size, reqs), None) for size in self.sizes]
        decodes: dict[int, BatchDescriptor] = {}
        if mode in ("full", "full_decode_only", "full_and_piecewise"):
            for size in self.sizes:
                # The size that passes R requests gives way to R requests, which would have no graph of their own.
                tokens = min(-(-size // query_len), reqs) * query_len
                if tokens <= self.sizes[-1]:
                    decodes[tokens] = BatchDescriptor("full", tokens, tokens // query_len, query_len)
        return (*reversed(mixed), *reversed(decodes.values()))

    def drop(self, descriptor: BatchDescriptor, reason: str) -> None:
        """This graph is not to be had: its steps take the next candidate, or run eagerly for ``reason``."""
        self._dropped[descriptor] = reason
        self._build()

    def restore(self) -> None:
        """Forget what was dropped."""
        self._dropped.clear()
        self._build()

    @property
    def dropped(self) -> dict[BatchDescriptor, str]:
        """What has no graph after all, and why."""
        return dict(self._dropped)

    # -- dispatch ------------------------------------------------------------------------------------------------------

    def dispatch(self, num_reqs: int, num_tokens: int, max_query_len: int) -> Decision:
        """The graph of a step of ``num_tokens`` tokens over ``num_reqs`` requests, the longest of ``max_query_len``.

        The first candidate that holds the step, full before piecewise and the smallest first.
        """
        if num_tokens >= len(self._mixed):
            return self._too_large(num_tokens) if self.sizes else self._none
        uniform = max_query_len == self.decode_query_len and num_tokens == num_reqs * max_query_len
        return (self._uniform if uniform else self._mixed)[num_tokens]

    def _too_large(self, num_tokens: int) -> Decision:
        found = self._late.get(num_tokens)
        if found is None:
            reason = f"{count(num_tokens, 'token')} exceed the largest capture size {self.sizes[-1]:,}"
            found = self._late[num_tokens] = Decision(None, reason)
        return found

    def _build(self) -> None:
        """Every token count's decision, for a batch of plain decodes and for any other."""
        live = [one for one in reversed(self._candidates) if one not in self._dropped]
        decodes = [one for one in live if one.query_len is not None]
        mixed = [one for one in live if one.query_len is None]
        counts = range(self.sizes[-1] + 1 if self.sizes else 0)
        self._late.clear()
        self._mixed = [self._decide(n, _first(mixed, n), False) for n in counts]
        self._uniform = [self._decide(n, _first(decodes, n) or _first(mixed, n), True) for n in counts]

    def _decide(self, tokens: int, found: BatchDescriptor | None, uniform: bool) -> Decision:
        lost = self._lost(tokens, uniform) if found is None or (uniform and found.query_len is None) else ""
        if found is None:
            return Decision(None, lost or self._why_none(tokens, uniform))
        exact = "as it is" if tokens == 1 else "as they are"
        padded = exact if found.num_tokens == tokens else f"padded to {found.num_tokens:,}"
        if found.mode == "piecewise":
            are = "is" if tokens == 1 else "are"
            why = f"piecewise: attention runs outside the graphs, over the {count(tokens, 'token')} there {are}"
        elif found.query_len is None:
            why = "one graph for any lengths"
        else:
            why = "plain decodes in one graph"
        more = "; ".join(reason for reason in (self.downgrade, lost) if reason)
        return Decision(found, f"{count(tokens, 'token')} {padded}; {why}" + (f" ({more})" if more else ""))

    def _lost(self, tokens: int, uniform: bool) -> str:
        """The best graph that the step would have had, and why it has not; '' if there never was one."""
        lost = [one for one in reversed(self._candidates) if one in self._dropped and one.num_tokens >= tokens]
        best = next((one for one in lost if uniform and one.query_len is not None), None)
        best = best or next((one for one in lost if one.query_len is None), None)
        return "" if best is None else f"the {best} could not be captured: {self._dropped[best]}"

    def _why_none(self, tokens: int, uniform: bool) -> str:
        if uniform:
            return f"{count(tokens, 'token')} exceed the largest graph of plain decodes"
        return f"a prefill chunk: only plain decodes have full graphs under {self.mode}"

    # -- for pictures --------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, object]]:
        """One row a candidate: ``graph`` (its words), mode, tokens, requests, query_len, the smallest and the largest
        step it takes (``from_tokens``, ``to_tokens``; 0 where none), and ``dropped`` ('' or why)."""
        rows: list[dict[str, object]] = []
        for one in self._candidates:
            decisions = self._mixed if one.query_len is None else self._uniform
            taken = [n for n, decision in enumerate(decisions) if n and decision.descriptor == one]
            rows.append(
                {
                    "graph": str(one),
                    "mode": one.mode,
                    "tokens": one.num_tokens,
                    "requests": one.num_reqs,
                    "query_len": one.query_len,
                    "from_tokens": min(taken, default=0),
                    "to_tokens": max(taken, default=0),
                    "dropped": self._dropped.get(one, ""),
                }
            )
        return rows


def resolve_mode(mode: GraphMode, full_graphs: bool, backend: str) -> tuple[GraphMode, str]:
    """What an attention backend leaves of ``mode``, and why ('' where it leaves all)."""
    if full_graphs or mode in ("none", "piecewise"):
        return mode, ""
    reason = f"the {backend} backend plans on the host, so no full graphs"
    return ("none" if mode == "full_decode_only" else "piecewise"), reason


def _first(live: list[BatchDescriptor], tokens: int) -> BatchDescriptor | None:
    """The smallest of ``live``, which ascends, that holds ``tokens``."""
    return next((one for one in live if one.num_tokens >= tokens), None)
