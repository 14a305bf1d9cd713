"""The engine's worker with a hand in between: it logs the calls, edits what comes back, and forces tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import GrammarOutput, ModelRunnerOutput

Edit = Callable[[ModelRunnerOutput], ModelRunnerOutput]
Choose = Callable[[str, list[int]], int]


def allowed_ids(row: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
    """Tokens that one row of a mask, int32[W], allows."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


class _Future:
    def __init__(self, worker: WorkerStub, step: int, inner: Any) -> None:
        self.worker, self.step, self.inner = worker, step, inner

    def get_output(self) -> ModelRunnerOutput:
        self.worker.log.append(f"fetch {self.step}")
        return self.worker.edit(self.inner.get_output())


class WorkerStub:
    """Put in front of ``engine.worker``; once an engine.

    ``choose(req_id, allowed)`` names the token of a structured request, which is forced by the runner's hook: so this
    needs no runner that applies masks.
    """

    def __init__(self, engine: Engine, edit: Edit = lambda output: output, choose: Choose | None = None) -> None:
        self.inner, self.edit, self.choose = engine.worker, edit, choose
        self.log: list[str] = []
        self.masks: list[tuple[int, str, list[int]]] = []
        """(step, request, allowed tokens)"""
        self._step = -1
        self._rt = engine.rt
        self._rt.register("test.force", _force)
        engine.core.worker = self

    def execute_model(self, message: Any) -> bool:
        self._step = message.step
        launched = bool(self.inner.execute_model(message))
        if launched:
            self.log.append(f"execute {self._step}")
        return launched

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> _Future:
        tokens: dict[str, int] = {}
        if grammar is not None:
            for req_id, rows in zip(grammar.req_ids, grammar.bitmask, strict=True):
                allowed = allowed_ids(rows[0])
                self.masks.append((self._step, req_id, allowed))
                if self.choose is not None:
                    tokens[req_id] = self.choose(req_id, allowed)
        names = "" if grammar is None else f" with {' '.join(grammar.req_ids)}"
        self.log.append(f"sample {self._step}{names}")
        self.inner.runner.force = (lambda ids, sampled: self._write(ids, sampled, tokens)) if tokens else None
        return _Future(self, self._step, self.inner.sample_tokens())

    def _write(self, req_ids: list[str], sampled: torch.Tensor, tokens: dict[str, int]) -> None:
        for row, req_id in enumerate(req_ids):
            if req_id in tokens:
                self._rt.run("test.force", sampled[row], tokens[req_id], writes=(sampled[row],))


def _force(row: torch.Tensor, token: int) -> None:
    row.fill_(token)
