"""Graphs between attentions: a decoder's segments are cut into pieces where a segment named ``*.attention`` stands.

Both classes stand in front of ``rt.run`` (``rt.segments``), so the decoder knows neither. Counterpart in vLLM:
``CUDAGraphWrapper`` around each part of a compiled model, or its breakable graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from mrv2lab.runtime.base import Graph, Runtime

Plan = dict[str, Graph | None]
"""Segment -> the graph to replay in its place; None = the graph that was replayed last holds it."""


def is_attention(segment: str) -> bool:
    """Whether a segment depends on the batch's composition, so that no piece may hold it."""
    return segment.endswith(".attention")


class PieceRecorder(AbstractContextManager["PieceRecorder"]):
    """Around one forward: consecutive segments go into one graph, attention is left out. ``plan`` is the result."""

    def __init__(self, rt: Runtime, name: str) -> None:
        self.plan: Plan = {}
        self.graphs: list[Graph] = []
        self._rt = rt
        self._name = name
        self._open = ExitStack()
        self._is_open = False

    def __enter__(self) -> PieceRecorder:
        self._rt.segments = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rt.segments = None
        try:
            self._open.__exit__(kind, error, trace)
        except BaseException:
            self._give_up()
            raise
        if kind is not None:
            self._give_up()

    def _give_up(self) -> None:
        for graph in self.graphs:
            graph.reset()

    def plays(self, name: str) -> bool:
        """See :class:`mrv2lab.runtime.effects.Segments`."""
        if is_attention(name):
            self._open.close()
            self._is_open = False
            return True
        if name in self.plan:
            raise RuntimeError(f"segment {name!r} runs twice in one forward; pieces go by a segment's name")
        if self._is_open:
            self.plan[name] = None
        else:
            graph = self._rt.graph(f"{self._name}.{len(self.graphs)}")
            self.plan[name] = graph
            self.graphs.append(graph)
            self._open.enter_context(graph.capture())
            self._is_open = True
        return False


class PiecePlayer(AbstractContextManager[None]):
    """Around one forward over the captured number of tokens: replays a graph where its first segment stands, skips the
    others, and lets attention run."""

    def __init__(self, rt: Runtime, plan: Plan, pieces: int, name: str) -> None:
        self._rt = rt
        self._plan = plan
        self._pieces = pieces
        self._name = name
        self._played = 0

    def __enter__(self) -> None:
        self._played = 0
        self._rt.segments = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rt.segments = None
        if kind is None and self._played != self._pieces:
            raise RuntimeError(
                f"{self._name}: {self._played} of {self._pieces} pieces were replayed; the forward ran other segments "
                "than at capture"
            )

    def plays(self, name: str) -> bool:
        """See :class:`mrv2lab.runtime.effects.Segments`."""
        try:
            graph = self._plan[name]
        except KeyError:
            if is_attention(name):
                return False
            raise RuntimeError(f"{self._name}: segment {name!r} was not there at capture") from None
        if graph is not None:
            graph.replay()
            self._played += 1
        return True
