"""FlashAttention 3 for transformers, out of vLLM's packages: the names of ``flash_attn_interface`` over vLLM's kernels.

vLLM's build cannot append keys and values to the cache in the same kernel, so another one of vLLM's writes them first.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from typing import Any

import torch


def install() -> None:
    """Make transformers find FlashAttention 3. Raises ``ImportError`` where vLLM's is not here."""
    kernels: Any = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    write: Any = importlib.import_module("vllm._custom_ops").reshape_and_cache_flash
    utilities: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
    models: Any = importlib.import_module("transformers.modeling_utils")
    one = torch.ones(1, device="cuda")

    def varlen(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        """q, k, v [tokens, heads, D], keys and values in a row."""
        made: torch.Tensor = kernels.flash_attn_varlen_func(
            q, k, v, int(max_seqlen_q), cu_seqlens_q, int(max_seqlen_k), cu_seqlens_k,
            softmax_scale=softmax_scale, causal=causal, window_size=list(window_size), fa_version=3,
        )  # fmt: skip
        return made

    def with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        """A decode step: q [r, 1, heads, D], k and v [r, 1, Hk, D], caches [pages, page, Hk, D]."""
        count, page = q.shape[0], k_cache.shape[1]
        # Rows past the batch have the length -1 and pages below 0: they write nowhere.
        column = (cache_seqlens.clamp(min=0) // page).long().unsqueeze(1)
        pages = page_table.gather(1, column).squeeze(1).long()
        slots = torch.where((cache_seqlens >= 0) & (pages >= 0), pages * page + cache_seqlens.long() % page, -1)
        write(k[:, 0], v[:, 0], k_cache, v_cache, slots, "auto", one, one)
        starts = torch.arange(count + 1, dtype=torch.int32, device=q.device)
        made: torch.Tensor = kernels.flash_attn_varlen_func(
            q[:, 0], k_cache, v_cache, 1, starts, page_table.shape[1] * page,
            seqused_k=(cache_seqlens + 1).clamp(min=0).int(), softmax_scale=softmax_scale, causal=causal,
            window_size=list(window_size), block_table=page_table, fa_version=3,
        )  # fmt: skip
        return made.unsqueeze(1)

    module: Any = types.ModuleType("flash_attn_interface")
    module.flash_attn_func = module.flash_attn_varlen_func = varlen
    module.flash_attn_with_kvcache = with_kvcache
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn_interface", None)
    sys.modules["flash_attn_interface"] = module
    utilities.is_flash_attn_3_available = lambda *_, **__: True
    models.PreTrainedModel._flash_attn_can_dispatch = lambda *_, **__: True
