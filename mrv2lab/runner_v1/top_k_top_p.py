"""Top-k and top-p by a full sort of every row. Counterpart in vLLM: ``apply_top_k_top_p_pytorch`` in
``v1/sample/ops/topk_topp_sampler.py``, which keeps every tie at the k-th value: here exactly k survive.
"""

from __future__ import annotations

import torch


def apply_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> None:
    """Queued work: -inf in place for what ``top_k`` int32[r] (V = all) and then ``top_p`` float32[r] (1 = all) leave
    out of ``logits`` float32[r, V].

    The sort is stable, greatest first, so ties stand in the order of their ids and the cut goes to the lowest. Top-p
    works on the survivors of top-k, renormalised, and keeps tokens up to the one that reaches p, one at least.
    """
    rows, vocab = logits.shape
    values, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    dropped = torch.zeros((rows, vocab), dtype=torch.bool, device=logits.device)
    if top_k is not None:
        k = top_k[:rows].to(logits.device, non_blocking=True).unsqueeze(1)
        dropped = torch.arange(vocab, device=logits.device) >= k
    if top_p is not None:
        p = top_p[:rows].to(logits.device, non_blocking=True).unsqueeze(1)
        reached = values.masked_fill_(dropped, float("-inf")).softmax(dim=-1).cumsum_(dim=-1) >= p
        # Rounded sums can pass 1 early; p = 1 is off.
        dropped[:, 1:] |= reached[:, :-1] & (p < 1)
    logits.masked_fill_(torch.empty_like(dropped).scatter_(1, order, dropped), float("-inf"))
