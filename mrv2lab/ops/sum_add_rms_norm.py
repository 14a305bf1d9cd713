"""What add_rms_norm does, for a product that was left as partial sums (small_mm.py): summed, rounded, added, normed."""

from __future__ import annotations

from mrv2lab.ops._op import jit, next_power_of_2, op
from mrv2lab.ops._pdl import early_start, let_next_start, wait_for_previous
from mrv2lab.ops.rms_norm import normalise, num_warps

tl = None


def sum_add_rms_norm_spec(out, parts, residual, weight, eps):
    """residual += sum of parts, each rounded to its dtype; out = rms_norm(residual). parts: float32[S, t, H]."""
    from mrv2lab.ops.add_rms_norm import add_rms_norm_spec

    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    add_rms_norm_spec(out, total.to(residual.dtype), residual, weight, eps)


@jit
def sum_add_rms_norm_kernel(
    out, out_stride, parts, parts_stride_s, parts_stride_t, residual, residual_stride, weight, eps, H,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < H
    dtype = out.dtype.element_ty
    w = tl.load(weight + col, mask=mask, other=0.0)
    wait_for_previous(PDL)
    before = tl.load(residual + row * residual_stride + col, mask=mask, other=0.0).to(tl.float32)
    part = parts + row * parts_stride_t + col
    total = tl.load(part, mask=mask, other=0.0)
    for _ in tl.static_range(SPLITS - 1):
        part += parts_stride_s
        total += tl.load(part, mask=mask, other=0.0)
    rounded = (total.to(dtype).to(tl.float32) + before).to(dtype)
    tl.store(residual + row * residual_stride + col, rounded, mask=mask)
    tl.store(out + row * out_stride + col, normalise(rounded.to(tl.float32), w, eps, H, dtype), mask=mask)


@op(spec=sum_add_rms_norm_spec, kernel=sum_add_rms_norm_kernel, writes=("out", "residual"), numpy=False)
def sum_add_rms_norm(kernel, out, parts, residual, weight, eps):
    """Add the sum of ``parts`` float32[S, t, H] to ``residual`` [t, H] in place, normalise into ``out`` [t, H]."""
    splits, t, hidden = parts.shape
    if t:
        block = next_power_of_2(hidden)
        kernel[(t,)](
            out, out.stride(0), parts, parts.stride(0), parts.stride(1), residual, residual.stride(0), weight, eps,
            hidden, SPLITS=splits, BLOCK=block, num_warps=num_warps(block), **early_start(out),
        )  # fmt: skip
