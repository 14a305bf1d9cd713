"""One batch for the sampler's benchmark, what an entrant is, and our own entries.

Ours are the kernels that the sampler launches (``mrv2lab``: masks in place, as the peers' ops do; then the search for
the cut alone, and the search and a draw that applies the cut by itself), and V1's ways in torch (``mrv2lab v1 ...``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mrv2lab.ops._cut import BOUNDS
from mrv2lab.ops._op import Op
from mrv2lab.ops.argmax import argmax_rows, num_blocks
from mrv2lab.ops.gumbel import gumbel_sample, num_slices
from mrv2lab.ops.gumbel_cut import gumbel_cut_sample
from mrv2lab.ops.min_p import apply_min_p, min_p_cut, num_groups
from mrv2lab.ops.penalties import apply_penalties
from mrv2lab.ops.top_k_top_p import apply_cut, find_cut
from mrv2lab.runner_v1.logprobs import gather_logprobs
from mrv2lab.runner_v1.top_k_top_p import apply_top_k_top_p
from mrv2lab.sample.cut_buffers import CutBuffers
from mrv2lab.sample.token_logprobs import TokenLogprobs

OPS = ("gumbel", "greedy", "topk_topp", "top_p", "min_p", "logprobs", "penalties")
TOP_K, TOP_P, MIN_P, LOGPROBS = 20, 0.95, 0.05, 20
AND_DRAWS = "mrv2lab, cut in the draw (and draws)"
"""What a step does whose processed logits nobody reads: it finds the cut, and draws with it. Less the ``gumbel`` row,
it is what the cut costs such a step."""
PENALTIES = (1.1, 0.2, 0.1)
"""Repetition, frequency, presence."""
HISTORY = 1024
"""Tokens of prompt, and of output, that the penalties know of each request."""


@dataclass(frozen=True)
class Entrant:
    """One way to do one ``op``. ``run`` is timed; ``before`` is not, and restores the logits that ``run`` edits."""

    op: str
    impl: str
    run: Callable[[], object]
    before: Callable[[], object] | None = None
    owned: int | Callable[[], int] = 0
    """Bytes that it keeps between calls, beside its inputs, the requests' state and its output; a function is asked
    after the first call."""

    def owned_bytes(self) -> int:
        """``owned`` as a number."""
        return self.owned() if callable(self.owned) else self.owned


class Direct:
    """A runtime that launches at once on torch's current stream: nothing but the kernels is timed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.backend: Any = "triton" if device.type == "cuda" else "spec"

    def kernel(self, op: Op, *args: Any) -> None:
        op.execute(self.backend, args)

    def empty(self, shape: Any, dtype: torch.dtype, *, name: str, place: str = "device") -> torch.Tensor:
        return self.zeros(shape, dtype, name=name, place=place)

    def zeros(self, shape: Any, dtype: torch.dtype, *, name: str, place: str = "device") -> torch.Tensor:
        if place == "device":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.zeros(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def adopt(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor.to(self.device)


class SamplerBatch:
    """``rows`` decoding requests over ``vocab`` tokens, their state rows shuffled; logits N(0, 2) of ``dtype``.

    The parameters are those of the module: temperature 1, top-k 20, top-p 0.95, min-p 0.05, 20 log-probabilities, three
    penalties over 1,024 tokens of prompt and as many of output.
    """

    def __init__(self, rows: int, vocab: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)

        def here(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device)

        def everybody(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        def tokens() -> torch.Tensor:
            return here(torch.randint(0, vocab, (rows, HISTORY), generator=made))

        self.rows, self.vocab, self.dtype, self.device = rows, vocab, dtype, device
        # [n, V], and a copy that entrants may edit
        self.logits = here((torch.randn(rows, vocab, generator=made) * 2).to(dtype))
        self.work = self.logits.clone()
        # [n] int32 each
        self.idx_mapping = here(torch.randperm(rows, generator=made).int())
        self.zeros, self.arange = everybody(0, torch.int32), here(torch.arange(rows, dtype=torch.int32))
        # [R] or [n] each
        self.temperature = everybody(1.0)
        self.seeds = here(torch.randint(-(2**62), 2**62, (rows,), generator=made))
        self.positions = here(torch.randint(0, 40_000, (rows,), generator=made))
        self.logits_indices = here(torch.arange(rows))
        self.input_ids = here(torch.randint(0, vocab, (rows,), generator=made).int())
        self.chosen = here(torch.randint(0, vocab, (rows,), generator=made))
        self.top_k, self.no_top_k = everybody(min(TOP_K, vocab), torch.int32), everybody(vocab, torch.int32)
        self.top_p, self.min_p, self.log_min_p = everybody(TOP_P), everybody(MIN_P), everybody(MIN_P).log()
        self.penalties = tuple(everybody(value) for value in PENALTIES)
        # [n, HISTORY] int64 in batch order, and what the rows remember of them: int32[R, ceil(V / 32)] and int32[R, V]
        self.prompts, self.outputs = tokens(), tokens()
        counts = torch.zeros((rows, vocab), dtype=torch.int32, device=device)
        counts.scatter_add_(1, self.outputs, torch.ones_like(self.outputs, dtype=torch.int32))
        seen = torch.zeros((rows, -(-vocab // 32) * 32), dtype=torch.int64, device=device)
        bits = seen.scatter_(1, self.prompts, 1).view(rows, -1, 32) << torch.arange(32, device=device)
        self.output_bin_counts, self.prompt_bin_mask = torch.empty_like(counts), bits.sum(-1).to(torch.int32)
        where = self.idx_mapping.long()
        self.output_bin_counts[where], self.prompt_bin_mask[where] = counts, self.prompt_bin_mask.clone()

    def restore(self) -> None:
        """Undo what an entrant did to ``work``."""
        self.work.copy_(self.logits)

    def least_bytes(self, op: str) -> int:
        """What ``op`` must read whatever the method: the logits once; of penalties the counts, since only the few
        tokens that were seen need their logits."""
        table = self.output_bin_counts if op == "penalties" else self.logits
        return int(table.nbytes)


def our_ways(batch: SamplerBatch) -> list[Entrant]:
    """MRV2's kernels, then V1's ways in torch."""
    return _mrv2(batch) + _v1(batch)


def _mrv2(b: SamplerBatch) -> list[Entrant]:
    rt: Any = Direct(b.device)
    n, blocks = b.rows, num_blocks(b.vocab)
    out = torch.empty(n, dtype=torch.int64, device=b.device)
    local_max = torch.empty((n, blocks), dtype=torch.float32, device=b.device)
    local_arg = torch.empty((n, blocks), dtype=torch.int32, device=b.device)
    group_max = torch.empty((n, num_groups(b.vocab, blocks)), dtype=torch.float32, device=b.device)
    min_p_scratch, min_p_bytes = (local_max, group_max), int(local_max.nbytes + group_max.nbytes)
    local, local_bytes = (local_max, local_arg), int(local_max.nbytes + local_arg.nbytes)
    slices = (n, num_slices(n, b.vocab))
    drawn = torch.empty(slices, device=b.device), torch.empty(slices, dtype=torch.int32, device=b.device)
    drawn_bytes = sum(int(part.nbytes) for part in drawn)
    who = (b.idx_mapping, b.temperature, b.seeds, b.positions, b.logits_indices)
    cut = CutBuffers.make(rt, "cut", n, b.vocab, listed=512, candidates=1024, narrow=True)
    assert cut.bounds.shape[1] == BOUNDS
    least = torch.empty(n, dtype=torch.float32, device=b.device)
    found = TokenLogprobs(rt, max_rows=n, vocab_size=b.vocab, max_top=LOGPROBS)
    k = found.max_top
    asked = torch.full((n,), k, dtype=torch.int32, device=b.device)
    said = (
        torch.empty((n, 1 + k), dtype=torch.int32, device=b.device),
        torch.empty((n, 1 + k), dtype=torch.float32, device=b.device),
        torch.empty(n, dtype=torch.int32, device=b.device),
    )

    def cut_to(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, narrow: bool) -> None:
        find_cut(rt, cut, logits, b.arange, b.idx_mapping, b.chosen, False, top_k, top_p, narrow)

    def cut_in_place(top_k: torch.Tensor, narrow: bool) -> None:
        cut_to(b.work, top_k, b.top_p, narrow)
        apply_cut(rt, b.work, b.arange, cut.group_max, cut.cut_value, cut.cut_id)

    def cut_and_draw(top_k: torch.Tensor, narrow: bool) -> torch.Tensor:
        cut_to(b.logits, top_k, b.top_p, narrow)
        gumbel_cut_sample(rt, out, *drawn, b.logits, *who, (cut.cut_value, cut.cut_id, cut.group_max))
        return out

    def min_p_and_draw() -> torch.Tensor:
        min_p_cut(rt, least, *min_p_scratch, b.logits, b.idx_mapping, b.log_min_p, b.temperature)
        gumbel_cut_sample(rt, out, *drawn, b.logits, *who, (least, None, group_max))
        return out

    entrants = [
        Entrant("gumbel", "mrv2lab", lambda: gumbel_sample(rt, out, *drawn, b.logits, *who, True), None, drawn_bytes),
        Entrant("greedy", "mrv2lab", lambda: argmax_rows(rt, out, *local, b.logits, b.idx_mapping), None, local_bytes),
        Entrant("topk_topp", "mrv2lab", lambda: cut_in_place(b.top_k, False), b.restore, cut.nbytes),
        Entrant("topk_topp", "mrv2lab find only", lambda: cut_to(b.logits, b.top_k, b.top_p, False), None, cut.nbytes),
        Entrant("topk_topp", AND_DRAWS, lambda: cut_and_draw(b.top_k, False), None, cut.nbytes + drawn_bytes),
        Entrant("top_p", "mrv2lab", lambda: cut_in_place(b.no_top_k, True), b.restore, cut.nbytes),
        Entrant("top_p", "mrv2lab find only", lambda: cut_to(b.logits, b.no_top_k, b.top_p, True), None, cut.nbytes),
        Entrant("top_p", AND_DRAWS, lambda: cut_and_draw(b.no_top_k, True), None, cut.nbytes + drawn_bytes),
        Entrant("min_p", AND_DRAWS, min_p_and_draw, None, min_p_bytes + drawn_bytes),
        Entrant("min_p", "mrv2lab",
                lambda: apply_min_p(rt, b.work, *min_p_scratch, b.idx_mapping, b.log_min_p), b.restore, min_p_bytes),
        Entrant("min_p", "mrv2lab find only",
                lambda: min_p_cut(rt, least, *min_p_scratch, b.logits, b.idx_mapping, b.log_min_p), None,
                min_p_bytes),
        Entrant("logprobs", "mrv2lab", lambda: found.launch(said, b.logits, b.arange, b.chosen, asked, False), None,
                found.buffers.nbytes),
    ]  # fmt: skip
    if b.dtype == torch.float32:  # the sampler's own copy is float32, so this kernel takes nothing else
        punish = lambda: apply_penalties(  # noqa: E731
            rt, b.work, b.idx_mapping, b.zeros, b.logits_indices, b.input_ids, *b.penalties, b.prompt_bin_mask,
            b.output_bin_counts,
        )  # fmt: skip
        entrants.append(Entrant("penalties", "mrv2lab", punish, b.restore))
    return entrants


def _v1(b: SamplerBatch) -> list[Entrant]:
    k = min(LOGPROBS, b.vocab)
    ids = torch.empty((b.rows, 1 + k), dtype=torch.int32, device=b.device)
    values = torch.empty((b.rows, 1 + k), dtype=torch.float32, device=b.device)
    ranks = torch.empty(b.rows, dtype=torch.int32, device=b.device)
    return [
        Entrant("topk_topp", "mrv2lab v1 stable sort", lambda: apply_top_k_top_p(b.work, b.top_k, b.top_p), b.restore),
        Entrant("top_p", "mrv2lab v1 stable sort", lambda: apply_top_k_top_p(b.work, None, b.top_p), b.restore),
        Entrant("logprobs", "mrv2lab v1 log_softmax + topk of 64-bit keys",
                lambda: gather_logprobs(ids, values, ranks, b.logits, b.chosen, True)),
    ]  # fmt: skip


def kept_bytes(rows: int, vocab: int) -> dict[str, int]:
    """Bytes of the buffers that MRV2's stages keep for ``rows`` logits rows, by op; nothing is allocated. The float32
    copy that edited logits need is not among them: V1 has it too."""
    rt: Any = Direct(torch.device("meta"))
    cut = CutBuffers.make(rt, "cut", rows, vocab, listed=512, candidates=1024, narrow=True).nbytes
    block = rows * num_blocks(vocab)
    found = TokenLogprobs(rt, max_rows=rows, vocab_size=vocab, max_top=LOGPROBS).buffers.nbytes
    drawn = 8 * rows * num_slices(rows, vocab)
    min_p = 4 * (block + rows * num_groups(vocab, num_blocks(vocab)))
    return {"gumbel": drawn, "greedy": 8 * block, "topk_topp": cut, "min_p": min_p, "logprobs": found}
