"""Graphs that hide inside the forward: who calls it does not see whether it launches, captures or replays.

The runner says what it wants in a context around the call, mode and key; the wrapper looks there. A key that it meets
for the first time is captured on the spot where capturing is enabled. Counterparts in vLLM: ``CUDAGraphWrapper`` in
``compilation/cuda_graph.py``, one around the whole model (FULL) and one around each piece between attentions
(PIECEWISE); ``set_forward_context`` in ``forward_context.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch

from mrv2lab.protocol import ForwardInputs, Model
from mrv2lab.runner_v1.graph_dispatcher import Decision, GraphKey, Mode
from mrv2lab.runtime.base import Graph, Runtime


class ForwardContext:
    """What the forward that is going on is to do, for whom it concerns to look up."""

    def __init__(self) -> None:
        self.mode: Mode = "NONE"
        self.key: GraphKey | None = None

    @contextmanager
    def set(self, decision: Decision) -> Iterator[None]:
        """Around one forward."""
        self.mode, self.key = decision.mode, decision.key
        try:
            yield
        finally:
            self.mode, self.key = "NONE", None


@dataclass(frozen=True, slots=True)
class _Whole:
    """A FULL graph."""

    graph: Graph
    # [t, H], device: where the graph leaves the hidden states
    output: torch.Tensor
    addresses: tuple[int, ...]
    """Of the inputs at capture."""


class GraphWrapper:
    """Stands where the model stands. See the module's docstring."""

    def __init__(self, rt: Runtime, model: Model, context: ForwardContext) -> None:
        self.rt = rt
        self.model = model
        self.context = context
        self.capturing = False
        """Whether a new key is captured. Off while requests run: a key without a graph is a bug then."""
        self.replay = True
        """False = what graphs would replay is launched eagerly over the same padded inputs, for comparing the two."""
        self.debug = False
        """Look at the inputs' addresses before every replay of a FULL graph, which would read the captured ones."""
        self._whole: dict[GraphKey, _Whole] = {}
        self._pieces: dict[GraphKey, Pieces] = {}

    # -- the model's two calls -----------------------------------------------------------------------------------------

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """As the model's: hidden states [t, H]. Raises ``RuntimeError`` for a key that has no graph."""
        mode, key = self.context.mode, self.context.key
        if key is None or not self.replay:
            return self.model.forward(inputs)
        return self._run_whole(key, inputs) if mode == "FULL" else self._run_pieces(key, inputs)

    def compute_logits(self, logits_indices: torch.Tensor, n: int, *, in_order: bool = False) -> torch.Tensor:
        """As the model's; never in a graph."""
        return self.model.compute_logits(logits_indices, n, in_order=in_order)

    # -- graphs --------------------------------------------------------------------------------------------------------

    def _run_whole(self, key: GraphKey, inputs: ForwardInputs) -> torch.Tensor:
        entry = self._whole.get(key)
        if entry is None:
            self._check_capturing("FULL", key)
            graph = self.rt.graph(f"v1.full.{key.num_tokens}" + ("" if key.uniform else ".any"))
            with graph.capture():
                output = self.model.forward(inputs)
            entry = self._whole[key] = _Whole(graph, output, _addresses(inputs))
        elif self.debug and entry.addresses != _addresses(inputs):
            raise RuntimeError(
                f"the inputs of the FULL graph {key} have moved since its capture; it would read the old ones"
            )
        entry.graph.replay()  # a first use is a use: the capture itself has run nothing
        return entry.output

    def _run_pieces(self, key: GraphKey, inputs: ForwardInputs) -> torch.Tensor:
        pieces = self._pieces.get(key)
        if pieces is None:
            self._check_capturing("PIECEWISE", key)
            pieces = Pieces(self.rt, f"v1.piecewise.{key.num_tokens}")
        with pieces:
            hidden = self.model.forward(inputs)
        self._pieces.setdefault(key, pieces)
        return hidden

    def _check_capturing(self, mode: Mode, key: GraphKey) -> None:
        """Before a capture; waits for the device, so that nothing runs meanwhile."""
        if not self.capturing:
            raise RuntimeError(f"no {mode} graph was captured for {key}, and capturing is over; run such steps as NONE")
        self.rt.synchronize()

    def graphs(self, mode: Mode, key: GraphKey) -> list[Graph]:
        """What was captured for ``key``."""
        if mode == "FULL":
            return [self._whole[key].graph] if key in self._whole else []
        return self._pieces[key].graphs if key in self._pieces else []

    def forget(self) -> None:
        """Drop every graph, and its memory."""
        for entry in self._whole.values():
            entry.graph.reset()
        for pieces in self._pieces.values():
            pieces.reset()
        self._whole.clear()
        self._pieces.clear()


class Pieces(AbstractContextManager["Pieces"]):
    """Around a forward, in front of ``rt.run`` (``rt.segments``): a run of segments without an attention is a piece.

    The first forward captures each piece and replays it when the next attention, or the end, closes it; later ones
    replay it where its first segment stands. Attention is launched eagerly each time, with the metadata it is given.
    """

    def __init__(self, rt: Runtime, name: str) -> None:
        self.graphs: list[Graph] = []
        self._rt = rt
        self._name = name
        self._starts: dict[str, Graph | None] = {}
        """Segment -> the piece that it starts; None inside one."""
        self._is_captured = False
        self._open: ExitStack | None = None

    def __enter__(self) -> Pieces:
        self._rt.segments = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rt.segments = None
        if self._is_captured:
            return
        try:
            if kind is None:
                self._close()
            elif self._open is not None:
                self._open.__exit__(kind, error, trace)
        finally:
            self._is_captured = kind is None and self._open is None
            if not self._is_captured:
                self.reset()

    def plays(self, name: str) -> bool:
        """See :class:`mrv2lab.runtime.effects.Segments`."""
        if name.endswith(".attention"):
            self._close()
            return False
        if self._is_captured:
            if name not in self._starts:
                raise RuntimeError(f"{self._name}: segment {name!r} was not there at capture")
            piece = self._starts[name]
            if piece is not None:
                piece.replay()
            return True
        if self._open is None:
            graph = self._rt.graph(f"{self._name}.{len(self.graphs)}")
            self._starts[name] = graph
            self.graphs.append(graph)
            self._open = ExitStack()
            self._open.enter_context(graph.capture())
        else:
            self._starts[name] = None
        return False

    def _close(self) -> None:
        """The piece that is being captured, if any, ends here."""
        if self._open is not None:
            self._open.close()
            self._open = None
            self.graphs[-1].replay()

    def reset(self) -> None:
        """Drop the graphs."""
        for graph in self.graphs:
            graph.reset()


def _addresses(inputs: ForwardInputs) -> tuple[int, ...]:
    """Where the tensors of a step's inputs are."""
    tensors = [inputs.input_ids, inputs.positions]
    for metadata in inputs.attn_metadata:
        tensors += [arg for arg in (metadata.slot_mapping, *metadata.args) if isinstance(arg, torch.Tensor)]
    return tuple(tensor.data_ptr() for tensor in tensors)
