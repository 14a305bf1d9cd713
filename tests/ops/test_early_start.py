"""Programmatic dependent launch, in the machine code: whoever may start early waits before touching what changes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from mrv2lab.ops import _pdl
from mrv2lab.ops._op import Op
from mrv2lab.ops.add_rms_norm import add_rms_norm
from mrv2lab.ops.gather_matvec import gather_matvec
from mrv2lab.ops.matvec_add import matvec_add
from mrv2lab.ops.norm_matvec import norm_matvec
from mrv2lab.ops.norm_matvec_silu import norm_matvec_silu
from mrv2lab.ops.rms_norm import rms_norm
from mrv2lab.ops.rotary_kv_write import rotary_kv_write
from mrv2lab.ops.silu_mul import silu_mul
from mrv2lab.ops.small_mm import small_mm
from mrv2lab.ops.small_mm_silu import small_mm_silu
from mrv2lab.ops.sum_add_rms_norm import sum_add_rms_norm
from tests.ops.backends import mutant
from tests.ops.test_float_kernels_compile import type_name

CONSTANTS = {"weight", "norm", "q_weight", "k_weight"}
"""Arguments that no kernel writes."""


def cases() -> dict[str, tuple[Op, tuple[Any, ...]]]:
    def b(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    x, norm, tile, small = b(2, 64), b(64), (2, 1), (16, 16, 32, 4, 2)
    long, table, cache, parts = (
        torch.zeros(2, dtype=torch.int64),
        torch.empty(8, 8),
        b(4, 8, 2, 16),
        torch.empty(2, 2, 64),
    )
    calls: list[tuple[Op, tuple[Any, ...]]] = [
        (rms_norm, (x, x, norm, 1e-6)),
        (add_rms_norm, (x, x, x, norm, 1e-6)),
        (sum_add_rms_norm, (x, parts, x, norm, 1e-6)),
        (silu_mul, (x, b(2, 128))),
        (rotary_kv_write, (b(2, 128), cache, cache, long, long, table, table, b(16), b(16), 1e-6)),
        (norm_matvec, (x, x, norm, b(64, 64), 1e-6, tile)),
        (norm_matvec_silu, (x, x, norm, b(128, 64), 1e-6, tile)),
        (matvec_add, (x, x, b(64, 64), tile)),
        (gather_matvec, (x, x, long, b(64, 64), tile)),
        (small_mm, (parts, x, b(64, 64), small)),
        (small_mm_silu, (x, x, b(128, 64), small)),
    ]
    late: list[tuple[Op, tuple[Any, ...]]] = [(op, (*args[:-1], (*small, True))) for op, args in calls[-2:]]
    named = {op.name: (op, args) for op, args in calls}
    return named | {f"{op.name}, late": (op, args) for op, args in late}


def ptx_of(op: Op, args: tuple[Any, ...]) -> str:
    """The PTX of the launch on a GPU that can do it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, made = op.kernel.load(), []

    class Compiler:
        def __getitem__(self, grid: Any) -> Any:
            return self.compile

        def compile(self, *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
            constants["PDL"] = True
            signature = {name: type_name(arg) for name, arg in zip(kernel.arg_names, args, strict=False)}
            signature |= dict.fromkeys(constants, "constexpr")
            options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": True}
            source = ASTSource(kernel, signature, constants)
            made.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])

    op.launch(Compiler(), *args)
    return made[0]


def touched_before_the_wait(op: Op, ptx: str) -> set[str]:
    """The kernel's pointer arguments that its code mentions in front of ``griddepcontrol.wait``, constants left out.

    Parameters are loaded early; what counts is an access whose address came from one. Addresses are followed from
    register to register, in the order of the text, which is straight up to there.
    """
    front, wait, _ = ptx.partition("griddepcontrol.wait")
    assert wait, f"{op.name} never waits"
    names = list(op.kernel.load().arg_names)
    source: dict[str, set[str]] = {}
    found: set[str] = set()
    for line in front.splitlines():
        loaded = re.search(r"ld\.param\.\w+\s+(?:\{)?(%\w+)\}?, \[\w+_param_(\d+)\]", line)
        if loaded:
            source[loaded[1]] = {names[int(loaded[2])]} if int(loaded[2]) < len(names) else set()
            continue
        registers = re.findall(r"%\w+", line)
        if re.search(r"(ld|st)\.global|cp\.async\.c|red\.|atom\.", line):
            address = re.findall(r"\[\s*(%\w+)", line)
            found |= set().union(*(source.get(register, set()) for register in address))
        elif len(registers) > 1:
            source[registers[0]] = set().union(*(source.get(register, set()) for register in registers[1:]))
    return found - CONSTANTS - {name for name in names if name in ("t", "N", "I", "H")}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", cases())
def test_waits_before_it_touches_anything_but_weights(name):
    pytest.importorskip("triton")
    op, args = cases()[name]
    ptx = ptx_of(op, args)
    assert "griddepcontrol.launch_dependents" in ptx
    assert touched_before_the_wait(op, ptx) == set()


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", ["small_mm", "small_mm_silu"])
def test_late_is_behind_the_sum(name):
    pytest.importorskip("triton")
    for case, late in ((name, False), (f"{name}, late", True)):
        front, start, _ = ptx_of(*cases()[case]).partition("griddepcontrol.launch_dependents")
        assert start and ("griddepcontrol.wait" in front) == ("mma." in front) == late


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_a_kernel_that_waits_too_late_is_seen(tmp_path):
    pytest.importorskip("triton")
    wait, add = "    wait_for_previous(PDL)\n", "    n = first + tl.arange(0, ROWS)\n"
    late = mutant(matvec_add, wait + add, add + "    early = tl.load(residual + n)\n" + wait, tmp_path)
    late = mutant(late, "(before + product", "(early.to(tl.float32) + before + product", tmp_path)
    args = cases()["matvec_add"][1]
    assert touched_before_the_wait(late, ptx_of(late, args)) == {"residual"}
    never = mutant(matvec_add, wait, "", tmp_path)
    with pytest.raises(AssertionError, match="never waits"):
        touched_before_the_wait(never, ptx_of(never, args))


class OnGpu:
    """As much of a CUDA tensor as is asked about."""

    is_cuda = True

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)


def test_only_where_the_device_can_do_it(monkeypatch):
    monkeypatch.setattr(_pdl, "_capable", {0: True, 1: False})
    assert _pdl.early_start(OnGpu(0)) == {"PDL": True, "launch_pdl": True}
    assert _pdl.early_start(OnGpu(1)) == {"PDL": False}
    assert _pdl.early_start(torch.empty(1)) == {"PDL": False}
    with _pdl.without_early_start():
        assert _pdl.early_start(OnGpu(0)) == {"PDL": False}
    assert _pdl.early_start(OnGpu(0)) == {"PDL": True, "launch_pdl": True}
