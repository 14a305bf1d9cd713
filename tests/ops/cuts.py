"""The chain of ops that finds a cut, on any backend, and the rows on which it is tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mrv2lab.ops._cut import OFF
from mrv2lab.ops._op import Op
from mrv2lab.ops.top_k_top_p import find_cut
from mrv2lab.protocol import Backend
from mrv2lab.sample.cut_buffers import CutBuffers
from tests.ops.backends import POISON, run
from tests.sample import oracle

INF, NAN = float("inf"), float("nan")


class Now:
    """A runtime that runs at once and remembers what it ran. ``mutants`` stand in for ops of the same name.

    ``triton`` tensors live on the GPU throughout, since a step's tensors would take long to travel.
    """

    def __init__(self, backend: Backend, mutants: tuple[Op, ...] = ()) -> None:
        self.backend = backend
        self.device = "cuda" if backend == "triton" else "cpu"
        self.launched: list[str] = []
        self._mutants = {op.name: op for op in mutants}

    def kernel(self, op: Op, *args: Any) -> None:
        self.launched.append(op.name)
        op = self._mutants.get(op.name, op)
        if self.backend == "triton":
            op.execute("triton", args)
        else:
            run(op, args, self.backend)

    def empty(self, shape: Any, dtype: torch.dtype, *, name: str, place: str = "device") -> torch.Tensor:
        return torch.full(shape, NAN if dtype.is_floating_point else POISON, dtype=dtype, device=self.device)


def find(
    rt: Now,
    logits: torch.Tensor,
    ks: Any,
    ps: Any,
    *,
    mapping: Any = None,
    rows: Any = None,
    listed: int = 512,
    candidates: int = 1024,
    narrow: bool = True,
    temperature: Any = None,
) -> CutBuffers:
    """The cut of every entry; ``ks`` and ``ps`` are the tables, ``mapping`` and ``rows`` count up by default."""
    device = rt.device
    n = len(ks) if mapping is None else len(mapping)
    buffers = CutBuffers.make(
        rt, "", n, logits.shape[1], listed=listed, candidates=candidates, narrow=narrow  # type: ignore[arg-type]
    )  # fmt: skip
    at = torch.tensor(range(n) if rows is None else rows, dtype=torch.int32, device=device)
    to = torch.tensor(range(n) if mapping is None else mapping, dtype=torch.int32, device=device)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=device)
    top_k = torch.tensor(ks, dtype=torch.int32, device=device)
    top_p = torch.tensor(ps, dtype=torch.float32, device=device)
    of = None if temperature is None else torch.tensor(temperature, dtype=torch.float32, device=device)
    if logits.device.type != device:  # a copy that keeps the rows' stride
        logits = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=device).copy_(logits)
    find_cut(rt, buffers, logits, at, to, tokens, False, top_k, top_p, narrow, of)
    return buffers


def kept(row: torch.Tensor, value: float, last: int) -> np.ndarray[Any, Any]:
    """bool[V]: what a cut keeps of a row."""
    x = oracle.clean(row.float().numpy())
    if last == OFF:
        return np.asarray(x > -INF)
    return np.asarray((x > value) | ((x == value) & (np.arange(len(x)) <= last)))


def assert_cuts(logits: torch.Tensor, ks: Any, ps: Any, buffers: CutBuffers) -> None:
    """Every row keeps exactly the oracle's tokens, those excused whose cumulative probability is within 1e-5 of p."""
    values, ids = buffers.cut_value.tolist(), buffers.cut_id.tolist()
    for row, k, p, value, last in zip(logits, ks, ps, values, ids, strict=True):
        x = oracle.clean(row.float().numpy())
        x = oracle.top_k(np.where(x == INF, 1e9, x), k)  # the oracle's softmax knows no +inf
        want = oracle.top_p(x, float(np.float32(p))) > -INF
        wrong = want != kept(row, value, last)
        if p < 1:
            wrong &= ~oracle.excused(x, float(np.float32(p)))
        assert not wrong.any(), f"k {k}, p {p}: tokens {np.flatnonzero(wrong)[:5]} of {len(x)}, cut ({value}, {last})"


def odd_rows(vocab: int) -> torch.Tensor:
    """Eight rows [8, V]: normal, flat, few finite, NaN between, ties, all -inf, a single token, +inf."""
    made = torch.Generator().manual_seed(vocab)
    logits = torch.randn(8, vocab, generator=made) * 2
    logits[1] = 0.5
    logits[2, torch.arange(vocab) % 3 != 1] = -INF
    logits[3, ::2] = NAN
    logits[4] = torch.randint(-2, 2, (vocab,), generator=made).float() * 0.0 + (torch.arange(vocab) % 4).float()
    logits[5] = -INF
    logits[6] = -INF
    logits[6, vocab // 2] = -3.0
    logits[7, [1, vocab - 1]] = INF
    return logits
