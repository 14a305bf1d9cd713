"""The gate of SwiGLU: silu(gate) * up. Source: Shazeer, "GLU Variants Improve Transformer" (2020)."""

from __future__ import annotations

from mrv2lab.ops._op import cdiv, jit, op
from mrv2lab.ops._pdl import early_start, let_next_start, wait_for_previous

tl = None


def silu_mul_spec(out, gate_up):
    """out = silu(gate_up[:, :I]) * gate_up[:, I:], the silu rounded to the dtype first.

    out: [t, I]; gate_up: [t, 2I].
    """
    import torch

    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(torch.nn.functional.silu(gate), up, out=out)


@jit
def silu_times(gate, up, dtype: tl.constexpr):
    """float32 -> ``dtype``: silu(gate) * up, the silu rounded in between."""
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


@jit
def silu_mul_kernel(out, out_stride, gate_up, gate_up_stride, I, BLOCK: tl.constexpr, PDL: tl.constexpr):  # noqa: E741
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < I
    gate = tl.load(gate_up + row * gate_up_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + I + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + col, silu_times(gate, up, out.dtype.element_ty), mask=mask)


@op(spec=silu_mul_spec, kernel=silu_mul_kernel, writes=("out",), numpy=False)
def silu_mul(kernel, out, gate_up):
    """out [t, I] = silu(gate) * up, where gate and up are the halves of the rows of ``gate_up`` [t, 2I]."""
    t, width = out.shape
    if t:
        block = 1024
        kernel[(t, cdiv(width, block))](
            out, out.stride(0), gate_up, gate_up.stride(0), width, BLOCK=block, **early_start(out)
        )
