"""RMS normalisation of rows.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); rounding as in Hugging Face's LlamaRMSNorm
and Qwen3RMSNorm: statistics in float32, the normalised row rounded to the model's dtype, then times the weight.
"""

from __future__ import annotations

from mrv2lab.ops._op import jit, next_power_of_2, op
from mrv2lab.ops._pdl import early_start, let_next_start, wait_for_previous

tl = None


def rms_norm_spec(out, x, weight, eps):
    """out[i] = weight * (x[i] / sqrt(mean(x[i]^2) + eps)). ``out`` may be ``x``. out, x: [t, H]; weight: [H]."""
    import torch

    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    torch.mul((wide * scale).to(x.dtype), weight, out=out)


@jit
def normalise(wide, weight, eps, H, dtype: tl.constexpr):
    """float32 -> ``dtype``: one row ``wide`` of H numbers (zeros behind them) and its weights."""
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    return ((wide * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@jit
def rms_norm_kernel(out, out_stride, x, x_stride, weight, eps, H, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < H
    w = tl.load(weight + col, mask=mask, other=0.0)
    wait_for_previous(PDL)
    wide = tl.load(x + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + col, normalise(wide, w, eps, H, out.dtype.element_ty), mask=mask)


@op(spec=rms_norm_spec, kernel=rms_norm_kernel, writes=("out",), numpy=False)
def rms_norm(kernel, out, x, weight, eps):
    """Normalise each row of ``x`` [t, H] into ``out`` [t, H], which may be ``x``. ``weight`` [H]."""
    t, hidden = x.shape
    if t:
        block = next_power_of_2(hidden)
        kernel[(t,)](
            out, out.stride(0), x, x.stride(0), weight, eps, hidden,
            BLOCK=block, num_warps=num_warps(block), **early_start(x),
        )  # fmt: skip


def num_warps(block: int) -> int:
    """Warps for a row of ``block`` numbers: about eight numbers a thread."""
    return min(max(block // 256, 1), 16)
