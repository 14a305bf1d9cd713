"""A random step for the integer ops: requests anywhere in their lives, on scattered rows, stale data around them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

STALE = -1111
"""What a row holds behind its request's known tokens."""


@dataclass(frozen=True)
class Batch:
    """Row tables and per-step arrays as the ops take them. R > r rows, stale where no request lives."""

    num_reqs: int
    # [r] int32
    idx_mapping: torch.Tensor
    # [R + 1] int32, flat tail
    query_start_loc: torch.Tensor
    # [r + 1] int32
    cu_num_logits: torch.Tensor
    # [R, L] int32
    all_token_ids: torch.Tensor
    # [R] int32
    prefill_len: torch.Tensor
    # [R] int32
    total_len: torch.Tensor
    # [R] int32
    num_computed_tokens: torch.Tensor
    # [R] int64
    last_sampled_tokens: torch.Tensor
    # [R, K] int64
    draft_tokens: torch.Tensor
    # [r] int32: num_computed + query length
    seq_lens: torch.Tensor

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.prefill_len)

    @property
    def num_tokens(self) -> int:
        """t."""
        return int(self.query_start_loc[-1])

    @property
    def num_logits(self) -> int:
        """n."""
        return int(self.cu_num_logits[-1])


def random_batch(num_reqs: int, seed: int, num_drafts: int = 2, max_len: int = 45, spare_rows: int = 4) -> Batch:
    """Each request is a prefill chunk, a last chunk, a prompt tail padded by drafts, or a decode with 0..K drafts."""
    rng = np.random.default_rng(seed)
    num_rows = num_reqs + spare_rows
    rows = rng.permutation(num_rows)[:num_reqs]
    prefill, total, computed = (rng.integers(1, max_len, num_rows) for _ in range(3))  # stale unless set below
    tokens = rng.integers(0, 1000, (num_rows, max_len))
    last = rng.integers(0, 1000, num_rows)
    query_lens, logits = [], []
    for i, row in enumerate(rows):
        kind = (i + seed) % 4
        prefill[row] = total[row] = rng.integers(4, max_len - 10)
        drafts = int(rng.integers(0, num_drafts + 1))
        if kind == 0:  # a chunk that leaves at least one token
            computed[row] = rng.integers(0, prefill[row] - 2)
            query_lens.append(rng.integers(1, prefill[row] - computed[row]))
            logits.append(1)
        elif kind == 1:  # the last chunk
            computed[row] = rng.integers(0, prefill[row])
            query_lens.append(prefill[row] - computed[row])
            logits.append(1)
        elif kind == 2:  # the last prompt token, padded by placeholder drafts
            computed[row] = prefill[row] - 1
            query_lens.append(1 + drafts)
            logits.append(1 + drafts)
        else:  # decode
            total[row] += rng.integers(1, 6)
            computed[row] = total[row] - 1
            last[row] = tokens[row, total[row] - 1]
            query_lens.append(1 + drafts)
            logits.append(1 + drafts)
        tokens[row, total[row] :] = STALE  # a stale tail that nobody may read
    starts = np.zeros(num_rows + 1, np.int32)
    starts[1 : num_reqs + 1] = np.cumsum(query_lens)
    starts[num_reqs + 1 :] = starts[num_reqs]

    def int32(values):
        return torch.tensor(np.asarray(values), dtype=torch.int32)

    return Batch(
        num_reqs=num_reqs,
        idx_mapping=int32(rows),
        query_start_loc=int32(starts),
        cu_num_logits=int32(np.concatenate([[0], np.cumsum(logits)])),
        all_token_ids=int32(tokens),
        prefill_len=int32(prefill),
        total_len=int32(total),
        num_computed_tokens=int32(computed),
        last_sampled_tokens=torch.tensor(last),
        draft_tokens=torch.tensor(rng.integers(0, 1000, (num_rows, num_drafts))),
        seq_lens=int32(computed[rows] + np.diff(starts)[:num_reqs]),
    )
