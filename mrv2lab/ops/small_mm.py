"""x W^T for steps of tens to hundreds of tokens, where a library's product leaves most of the GPU idle.

At 256 tokens and 1,024 outputs there are 16 tiles of 128 x 128 for 132 processors. So tiles are small, and the sum over
K may be split: each split writes its partial sums in float32, and the kernel that reads the product adds them up in
order (sum_add_rms_norm.py). Nothing is added atomically: the same shapes give the same bits.
"""

from __future__ import annotations

from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op
from mrv2lab.ops._pdl import LINE, early_start, let_next_start, prefetch, wait_for_previous

tl = None


def split_len(k, splits, block_k):
    """Columns of a split: a multiple of ``block_k``; the last split may have fewer."""
    return cdiv(cdiv(k, splits), block_k) * block_k


def small_mm_spec(out, x, weight, tile):
    """out[s] = x[:, part s] W[:, part s]^T, summed in float32. out: [S, t, N]; x: [t, K]; weight: [N, K]."""
    length = split_len(x.shape[1], out.shape[0], tile[2])
    for s, part in enumerate(out):
        columns = slice(s * length, (s + 1) * length)
        part.copy_(x[:, columns].float() @ weight[:, columns].float().t())


@jit
def prefetch_rows(
    weight, row, first, K: tl.constexpr, LENGTH: tl.constexpr, PER_LINE: tl.constexpr, LINES_P2: tl.constexpr
):
    """Bring columns first .. first + LENGTH - 1 of the given rows of ``weight`` [N, K] into L2."""
    k = tl.minimum(first + tl.arange(0, LINES_P2) * PER_LINE, K - 1)
    prefetch(weight + row[:, None] * K + tl.minimum(k, first + LENGTH - 1)[None, :])


@jit
def load_columns(rows, k, K: tl.constexpr, EVEN: tl.constexpr):
    """Columns ``k`` of the rows at the pointers ``rows`` [n, 1]; zeros past K."""
    if EVEN:
        return tl.load(rows + k[None, :])
    else:
        return tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)


@jit(do_not_specialize=["t"])
def small_mm_kernel(
    out, out_stride_s, out_stride_t, x, x_stride, weight, t, N,
    K: tl.constexpr, LENGTH: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PER_LINE: tl.constexpr, LINES_P2: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if not LATE:
        let_next_start(PDL)
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(n, N - 1).to(tl.int64)  # past the end: the last row again, not stored
    if PDL:
        prefetch_rows(weight, weight_row, split * LENGTH, K, LENGTH, PER_LINE, LINES_P2)
    wait_for_previous(PDL)
    x_rows = x + tl.minimum(m, t - 1).to(tl.int64)[:, None] * x_stride
    weight_rows = weight + weight_row[:, None] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, LENGTH, BLOCK_K):
        k = split * LENGTH + start + tl.arange(0, BLOCK_K)
        a = load_columns(x_rows, k, K, EVEN)
        b = load_columns(weight_rows, k, K, EVEN)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if LATE:
        let_next_start(PDL)
    at = out + split.to(tl.int64) * out_stride_s + m.to(tl.int64)[:, None] * out_stride_t + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < t)[:, None] & (n < N)[None, :])


def tiling(x, splits, tile):
    """Launch options of a kernel over tiles of ``x`` [t, K] W^T."""
    block_m, block_n, block_k, warps, stages, *late = tile
    length = split_len(x.shape[1], splits, block_k)
    per_line = LINE // x.element_size()
    return {
        "K": x.shape[1],
        "LENGTH": length,
        "EVEN": x.shape[1] == length * splits,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "PER_LINE": per_line,
        "LINES_P2": next_power_of_2(cdiv(length, per_line)),
        "LATE": bool(late and late[0]),
        "num_warps": warps,
        "num_stages": stages,
        **early_start(x),
    }


@op(spec=small_mm_spec, kernel=small_mm_kernel, writes=("out",), numpy=False)
def small_mm(kernel, out, x, weight, tile):
    """out [S, t, N] = x [t, K] times ``weight`` [N, K]: the whole product for S = 1, else float32 partial sums.

    ``tile``: (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages) and, if the next kernel is not to start beside the sum but
    behind it, True.
    """
    splits, t, n = out.shape
    if t:
        kernel[(cdiv(t, tile[0]), cdiv(n, tile[1]), splits)](
            out, out.stride(0), out.stride(1), x, x.stride(0), weight, t, n, **tiling(x, splits, tile)
        )
