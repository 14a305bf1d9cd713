"""The float kernels compile to sm_90 machine code: Triton's compiler needs no GPU, only the launch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrv2lab.ops._op import Jit, Op
from mrv2lab.ops.add_rms_norm import add_rms_norm
from mrv2lab.ops.decode_attention import decode_attention
from mrv2lab.ops.kv_write import kv_write
from mrv2lab.ops.paged_attention import paged_attention
from mrv2lab.ops.rms_norm import rms_norm
from mrv2lab.ops.rotary import rotary
from mrv2lab.ops.silu_mul import silu_mul

POINTER = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiling:
    """Stands in for a kernel: ``kernel[grid](...)`` compiles for the arguments' types and launches nothing."""

    def __init__(self, kernel: Jit) -> None:
        self.kernel = kernel
        self.machine_code = b""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(n > 0 for n in grid)
        return self

    def __call__(
        self, *args: Any, num_warps: int = 4, num_stages: int = 3, maxnreg: int | None = None, **constants: Any
    ) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        function = self.kernel.load()
        signature = {name: type_name(arg) for name, arg in zip(function.arg_names, args, strict=False)}
        signature |= dict.fromkeys(constants, "constexpr")
        compiled = triton.compile(
            ASTSource(function, signature, constants),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg},
        )
        self.machine_code = compiled.asm["cubin"]
        assert compiled.metadata.shared <= 227 * 1024


def type_name(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return POINTER[arg.dtype]
    return "fp32" if isinstance(arg, float) else "i32"


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    "case", ["rms", "add_rms", "silu", "rotary", "rotary_norm", "kv_write", "decode", "mixed", "runs"]
)
def test_compiles(case, dtype):
    pytest.importorskip("triton")
    (hq, hk, d), t = (6, 2, 48), 3
    x, wide, weight = torch.empty(t, 96, dtype=dtype), torch.empty(t, 192, dtype=dtype), torch.empty(96, dtype=dtype)
    qkv, norm = torch.empty(t, (hq + 2 * hk) * d, dtype=dtype), torch.empty(d, dtype=dtype)
    q, k, table = qkv[:, : hq * d], qkv[:, hq * d : (hq + hk) * d], torch.empty(8, d // 2)
    cache, long, ints = (
        torch.empty(4, 8, hk, d, dtype=dtype),
        torch.empty(t, dtype=torch.int64),
        torch.empty(3, 2).int(),
    )
    heads = q.unflatten(1, (hq, d))
    rope = (q, k, long, table, table)
    batch = (heads, heads, cache, cache, ints, ints[:, 0], ints[:, 0])
    calls: dict[str, tuple[Op, tuple[Any, ...]]] = {
        "rms": (rms_norm, (x, x, weight, 1e-6)),
        "add_rms": (add_rms_norm, (x, x, x, weight, 1e-6)),
        "silu": (silu_mul, (x, wide)),
        "rotary": (rotary, (*rope, None, None, 1e-6)),
        "rotary_norm": (rotary, (*rope, norm, norm, 1e-6)),
        "kv_write": (kv_write, (cache, cache, k, k, long)),
        "decode": (paged_attention, (*batch, 1, 0.1, 0)),
        "mixed": (paged_attention, (*batch, 100, 0.1, 0)),
        "runs": (decode_attention, (*batch, 0.1, 0, torch.empty(8192, d), torch.empty(8192), ints)),
    }
    op, args = calls[case]
    compiling = Compiling(op.kernel)
    op.launch(compiling, *args)
    assert compiling.machine_code[:4] == b"\x7fELF"
