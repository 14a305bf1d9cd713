"""Which kernels carry out the decoder's matrix products, with the additions and norms that go with them.

The choice follows from the step's (padded) number of tokens t alone, never from values, so that a graph and the eager
run at its shape do the same, and both runners too:

    t <= FEW(EST)    matrix-vector kernels: every weight is read once, at memory speed; norms, the residual addition and
                     SwiGLU's gate are fused into them. What is pending after a sublayer: nothing.
    t <= MANY        small tiles and split sums (``ops/small_mm.py``), where a :class:`Plan` asks for them. Pending: the
                     product as partial sums, which the next norm adds to the residual stream.
    otherwise        the library's product. Pending: the product, in ``hidden``.

Specs, the interpreter and float32 always take the library's. The residual stream is rounded in the same places in all
of them; sums differ in their order (DESIGN.md's near class). Counterpart in vLLM: none, it leaves this to cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from mrv2lab.config import ModelConfig
from mrv2lab.ops._op import next_power_of_2
from mrv2lab.ops._pdl import without_early_start
from mrv2lab.ops.add_rms_norm import add_rms_norm
from mrv2lab.ops.gather_matvec import gather_matvec
from mrv2lab.ops.matvec_add import matvec_add
from mrv2lab.ops.norm_matvec import norm_matvec
from mrv2lab.ops.norm_matvec_silu import norm_matvec_silu
from mrv2lab.ops.rms_norm import rms_norm
from mrv2lab.ops.silu_mul import silu_mul
from mrv2lab.ops.small_mm import small_mm
from mrv2lab.ops.small_mm_silu import small_mm_silu
from mrv2lab.ops.sum_add_rms_norm import sum_add_rms_norm
from mrv2lab.protocol import Backend

FEW = 4
"""Tokens up to which the matrix-vector kernels are faster than the library."""
FEWEST = 2
"""The same where a plan follows: its tiles of 16 rows cost the same from 1 to 16 tokens."""
EARLY = 128
"""Tokens up to which kernels start before their predecessor has ended (``ops/_pdl.py``), if they are not the library's.
Larger steps, and norms between the library's products, are 1 to 5 % slower with it."""
MATVEC_NUMBERS = 4096
"""Weights that a warp of a matrix-vector kernel holds: 64 registers a thread."""


class Weight(NamedTuple):
    """A weight as the checkpoint has it, and the view of it that the library's product takes."""

    # [N, K]
    rows: torch.Tensor
    # [K, N]
    columns: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor) -> Weight:
        """``rows`` [N, K], contiguous."""
        return cls(rows, rows.t())


class Split(NamedTuple):
    """How ``small_mm`` computes one product."""

    # (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages[, late])
    tile: tuple[int, ...]
    # partial sums
    splits: int = 1


class Plan(NamedTuple):
    """How a layer's products are computed at some token count; None = by the library."""

    qkv: Split | None = None
    o_proj: Split | None = None
    gate_up: Split | None = None
    down: Split | None = None


LIBRARY = Plan()

QWEN3_0_6B_H200: dict[int, Plan] = {
    16: Plan(
        Split((16, 32, 128, 4, 4)), Split((16, 32, 128, 4, 4), 4), Split((16, 16, 128, 4, 4)),
        Split((16, 32, 128, 4, 4), 4),
    ),
    32: Plan(
        Split((32, 32, 128, 4, 4)), Split((32, 32, 128, 4, 4), 4), Split((32, 16, 128, 4, 4)),
        Split((32, 32, 128, 4, 4), 4),
    ),
    64: Plan(
        Split((64, 64, 128, 4, 3)), Split((64, 64, 64, 4, 4), 8), Split((64, 32, 128, 4, 3)),
        Split((64, 64, 128, 4, 3), 8),
    ),
    128: Plan(
        Split((64, 128, 64, 4, 4)), Split((128, 32, 64, 4, 4), 4), Split((64, 64, 128, 4, 3)),
        Split((128, 64, 64, 8, 4), 8),
    ),
}  # fmt: skip
"""Largest token count -> plan, by measurement (bench/decoder_bench.py). Behind it the library is faster."""

PLANS: dict[tuple[int, ...], dict[int, Plan]] = {(1024, 4096, 2048, 3072): QWEN3_0_6B_H200}
"""(hidden size, qkv width, query width, intermediate size) -> plans. A shape that was not measured has none."""


class Products:
    """The products of one decoder. Methods run inside queued segments and allocate nothing.

    ``hidden`` [t, H], ``residual`` [t, H] and ``partials`` float32[S, MANY, H] (None where no plan splits) are the
    residual stream: the sum so far in ``residual``, the last sublayer's product where the module's docstring says.
    ``plans`` (largest token count -> plan), ``few`` and ``early`` (:data:`EARLY`) replace what is measured, in any
    backend and type.
    """

    def __init__(
        self,
        backend: Backend,
        config: ModelConfig,
        plans: Mapping[int, Plan] | None = None,
        few: int | None = None,
        early: int = EARLY,
    ) -> None:
        self._backend = backend
        self._eps = config.rms_norm_eps
        fused = backend == "triton" and config.dtype != "float32"
        shape = config.hidden_size, config.q_size + 2 * config.kv_size, config.q_size, config.intermediate_size
        measured = PLANS.get(shape, {}) if fused else {}
        self._plans = _by_tokens(measured if plans is None else plans)
        self._few = few if few is not None else 0 if not fused else FEWEST if self._plans else FEW
        most = max(self._few, len(self._plans) - 1)
        self._early = [t <= early and (t <= self._few or self.plan(t) != LIBRARY) for t in range(most + 1)]

    @property
    def partials_shape(self) -> tuple[int, int] | None:
        """Partial sums and tokens that the scratch must hold; None = no scratch is needed."""
        splits = [split.splits for plan in self._plans for split in (plan.o_proj, plan.down) if split is not None]
        return (max(splits), len(self._plans) - 1) if splits else None

    def plan(self, t: int) -> Plan:
        """What holds for a step of ``t`` tokens."""
        return self._plans[t] if t < len(self._plans) else LIBRARY

    def starts_early(self, t: int) -> bool:
        """Whether the kernels of a step of ``t`` tokens start before their predecessors have ended."""
        return t < len(self._early) and self._early[t]

    def paced(self, segment: Callable[..., None]) -> Callable[..., None]:
        """``segment`` with early starts only where they pay for the rows of its first argument."""
        if self._backend != "triton":
            return segment

        def run(*args: Any) -> None:
            if self.starts_early(args[0].shape[0]):
                segment(*args)
            else:
                with without_early_start():
                    segment(*args)

        return run

    def kinds(self, max_num_tokens: int) -> tuple[int, ...]:
        """Token counts, ascending: the first of every range that shares its kernels. Runs at these compile them all."""

        def kind(t: int) -> tuple[Any, ...]:
            unrolled = next_power_of_2(t) if t <= self._few else 0
            return unrolled, self.plan(t), self.starts_early(t)

        last = min(max_num_tokens, max(len(self._plans), len(self._early)))
        return tuple(t for t in range(1, last + 1) if t == 1 or kind(t) != kind(t - 1))

    def norm_qkv(
        self,
        qkv: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        partials: torch.Tensor | None,
        norm: torch.Tensor,
        weight: Weight,
        first: bool,
    ) -> None:
        """qkv [t, N] = norm(residual stream) W^T. ``first``: the first layer, where nothing is pending."""
        t = qkv.shape[0]
        if t <= self._few:
            args = (qkv, residual, norm, weight.rows, self._eps, matvec_tile(weight.rows))
            norm_matvec.execute(self._backend, args)
            return
        plan = self.plan(t)
        if first:
            rms_norm.execute(self._backend, (hidden, residual, norm, self._eps))
        else:
            self._add_norm(hidden, residual, partials, norm, plan.down)
        if plan.qkv is None:
            torch.mm(hidden, weight.columns, out=qkv)
        else:
            small_mm.execute(self._backend, (qkv.unsqueeze(0), hidden, weight.rows, plan.qkv.tile))

    def o_proj(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        partials: torch.Tensor | None,
        x: torch.Tensor,
        weight: Weight,
    ) -> None:
        """Attention's output x [t, Hq * D] times W^T, added to the residual stream or pending."""
        self._add_product(hidden, residual, partials, x, weight, self.plan(x.shape[0]).o_proj)

    def norm_gate_up(
        self,
        act: torch.Tensor,
        gate_up: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        partials: torch.Tensor | None,
        norm: torch.Tensor,
        weight: Weight,
    ) -> None:
        """act [t, I] = silu(gate) * up of norm(residual stream). ``gate_up`` [t, 2I] is used by the library's way."""
        t = act.shape[0]
        if t <= self._few:
            args = (act, residual, norm, weight.rows, self._eps, matvec_tile(weight.rows, 2))
            norm_matvec_silu.execute(self._backend, args)
            return
        plan = self.plan(t)
        self._add_norm(hidden, residual, partials, norm, plan.o_proj)
        if plan.gate_up is None:
            torch.mm(hidden, weight.columns, out=gate_up)
            silu_mul.execute(self._backend, (act, gate_up))
        else:
            small_mm_silu.execute(self._backend, (act, hidden, weight.rows, plan.gate_up.tile))

    def down(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        partials: torch.Tensor | None,
        x: torch.Tensor,
        weight: Weight,
    ) -> None:
        """x [t, I] times W^T, added to the residual stream or pending."""
        self._add_product(hidden, residual, partials, x, weight, self.plan(x.shape[0]).down)

    def final_norm(
        self, hidden: torch.Tensor, residual: torch.Tensor, partials: torch.Tensor | None, norm: torch.Tensor
    ) -> None:
        """hidden = norm(residual stream)."""
        if hidden.shape[0] <= self._few:
            rms_norm.execute(self._backend, (hidden, residual, norm, self._eps))
        else:
            self._add_norm(hidden, residual, partials, norm, self.plan(hidden.shape[0]).down)

    def logits(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        weight: Weight,
        *,
        in_order: bool = False,
    ) -> None:
        """out [n, V] = rows ``indices`` of ``hidden`` times W^T. ``rows`` [n, H]: scratch. ``in_order``: the indices
        are 0, 1, 2, ..."""
        if out.shape[0] <= self._few:
            args = (out, hidden, indices, weight.rows, matvec_tile(weight.rows))
            gather_matvec.execute(self._backend, args)
        elif in_order:
            torch.mm(hidden[: out.shape[0]], weight.columns, out=out)
        else:
            torch.index_select(hidden, 0, indices, out=rows)
            torch.mm(rows, weight.columns, out=out)

    def _add_norm(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        partials: torch.Tensor | None,
        norm: torch.Tensor,
        pending: Split | None,
    ) -> None:
        """Add what is pending to ``residual``; hidden = norm(residual)."""
        if pending is None:
            add_rms_norm.execute(self._backend, (hidden, hidden, residual, norm, self._eps))
        else:
            assert partials is not None
            parts = partials[: pending.splits, : hidden.shape[0]]
            sum_add_rms_norm.execute(self._backend, (hidden, parts, residual, norm, self._eps))

    def _add_product(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        partials: torch.Tensor | None,
        x: torch.Tensor,
        weight: Weight,
        split: Split | None,
    ) -> None:
        """x W^T: into ``residual`` (few tokens), or pending."""
        if x.shape[0] <= self._few:
            matvec_add.execute(self._backend, (residual, x, weight.rows, matvec_tile(weight.rows)))
        elif split is None:
            torch.mm(x, weight.columns, out=hidden)
        else:
            assert partials is not None
            out = partials[: split.splits, : x.shape[0]]
            small_mm.execute(self._backend, (out, x, weight.rows, split.tile))


def matvec_tile(weight: torch.Tensor, weights: int = 1) -> tuple[int, int]:
    """(weight rows, warps) of a matrix-vector program that holds rows of ``weights`` weights as wide as this one."""
    width = weights * next_power_of_2(weight.shape[1])
    rows = max(1, MATVEC_NUMBERS // width)
    return rows, min(16, max(1, rows * width // MATVEC_NUMBERS))


def _by_tokens(plans: Mapping[int, Plan]) -> list[Plan]:
    """The plan of every token count up to the largest with a plan: a lookup, since this is asked at every launch."""
    found: list[Plan] = []
    for largest in sorted(plans):
        found += [plans[largest]] * (largest + 1 - len(found))
    return found
