"""flashinfer's two wrappers as this code calls them: they note what they are planned with and attend in plain torch.

The real ones copy row pointers and last page lengths when planned and keep a reference to the page indices, which the
device fills by the time it attends; so do these.
"""

from __future__ import annotations

from typing import Any

import torch

from mrv2lab.runtime.device_tensor import plain


class _Wrapper:
    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        assert kv_layout == "NHD"
        assert not workspace.any()
        self.options = options
        self.plans: list[dict[str, Any]] = []

    def _plan(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        for host in (qo_indptr, indptr, last_page_len):
            assert type(host) is torch.Tensor, "planned from host tensors, or it waits"
            assert host.dtype == torch.int32
        assert indices.dtype == torch.int32
        assert len(indices) == indptr[-1]
        self.plans.append(
            options
            | {
                "qo_indptr": qo_indptr.clone(),
                "indptr": indptr.clone(),
                "indices": indices,
                "last_page_len": last_page_len.clone(),
                "shape": (num_qo_heads, num_kv_heads, head_dim, page_size),
            }
        )

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """Attend as the latest plan says; every listed page is read whole, as the kernels may."""
        plan = self.plans[-1]
        heads, kv_heads, head_dim, page_size = plan["shape"]
        assert q.shape == out.shape == (int(plan["qo_indptr"][-1]), heads, head_dim)
        assert (q.dtype, q.dtype) == (plan["q_data_type"], plan["kv_data_type"])
        for j, last in enumerate(plan["last_page_len"].tolist()):
            pages = plain(plan["indices"])[plan["indptr"][j] : plan["indptr"][j + 1]]
            rows = slice(int(plan["qo_indptr"][j]), int(plan["qo_indptr"][j + 1]))
            length, m = max(len(pages) - 1, 0) * page_size + last, rows.stop - rows.start
            if not m:
                continue
            keys, values = (
                cache[pages.long()].flatten(0, 1)[:length].double().repeat_interleave(heads // kv_heads, 1)
                for cache in paged_kv_cache
            )
            position = torch.arange(length - m, length).view(m, 1, 1)
            key = torch.arange(length)
            seen = key <= position
            if plan["window_left"] >= 0:
                seen &= key >= position - plan["window_left"]
            scores = torch.einsum("mhd,nhd->mhn", q[rows].double(), keys) * plan["sm_scale"]
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("mhn,nhd->mhd", weights, values).to(out.dtype)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query a request."""

    def plan(self, indptr: torch.Tensor, *args: Any, **options: Any) -> None:
        assert "causal" not in options
        self._plan(torch.arange(len(indptr), dtype=torch.int32), indptr, *args, **options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Any number of queries a request."""

    def plan(self, qo_indptr: torch.Tensor, *args: Any, causal: bool = False, **options: Any) -> None:
        assert causal
        self._plan(qo_indptr, *args, **options)
