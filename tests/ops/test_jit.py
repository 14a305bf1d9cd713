"""The kernels compile for an H200 on a machine without a GPU, and what changes every step does not recompile them."""

import importlib.util
import sys

import pytest

from mrv2lab.ops import _op
from mrv2lab.ops._op import Jit, jit
from mrv2lab.ops.apply_write import apply_write
from mrv2lab.ops.checksum import checksum
from mrv2lab.ops.combine_tokens import combine_tokens
from mrv2lab.ops.expand_idx_mapping import expand_idx_mapping
from mrv2lab.ops.flat_pos_seq_lens import flat_pos_seq_lens
from mrv2lab.ops.fused_apply_write import fused_apply_write
from mrv2lab.ops.gather_block_tables import gather_block_tables
from mrv2lab.ops.num_sampled import num_sampled_and_rejected
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.ops.post_update import post_update, post_update_num_computed
from mrv2lab.ops.prefill_inputs import prefill_inputs
from mrv2lab.ops.scatter_sampled import scatter_sampled
from mrv2lab.ops.slot_mapping import slot_mapping
from tests.ops import (
    test_apply_write,
    test_combine_tokens,
    test_expand_idx_mapping,
    test_flat_pos_seq_lens,
    test_fused_apply_write,
    test_gather_block_tables,
    test_num_sampled,
    test_pos_seq_lens,
    test_post_update,
    test_prefill_inputs,
    test_scatter_sampled,
    test_slot_mapping,
)
from tests.ops.backends import compile_for_gpu, implementation

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CHECKS = {
    apply_write: test_apply_write.check,
    fused_apply_write: test_fused_apply_write.check,
    prefill_inputs: test_prefill_inputs.check,
    pos_seq_lens: test_pos_seq_lens.check,
    combine_tokens: test_combine_tokens.check,
    expand_idx_mapping: test_expand_idx_mapping.check,
    num_sampled_and_rejected: test_num_sampled.check,
    post_update: test_post_update.check,
    post_update_num_computed: test_post_update.check_num_computed,
    gather_block_tables: test_gather_block_tables.check,
    slot_mapping: test_slot_mapping.check,
    flat_pos_seq_lens: test_flat_pos_seq_lens.check,
    scatter_sampled: test_scatter_sampled.check,
}


class Compiled(Exception):
    pass


@needs_triton
@pytest.mark.parametrize("op", CHECKS, ids=lambda op: op.name)
def test_compiles_for_sm_90(op, tmp_path) -> None:
    def apply(*args) -> None:
        assert "ld.global" in compile_for_gpu(op, args, tmp_path)
        raise Compiled

    with pytest.raises(Compiled):
        CHECKS[op](apply)


@needs_triton
def test_step_sizes_do_not_specialize() -> None:
    for op in (num_sampled_and_rejected, post_update_num_computed, gather_block_tables):
        unspecialized = [param.name for param in op.kernel.load().params if param.do_not_specialize]
        assert unspecialized == ["num_reqs"]


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(TypeError, match=r"kernel copy_kernel has no argument \['m'\]"):

        @jit(do_not_specialize=["m"])
        def copy_kernel(n): ...


def test_both_spellings() -> None:
    @jit
    def plain(n): ...

    @jit(do_not_specialize=["n"])
    def stable(n): ...

    assert isinstance(plain, Jit)
    assert plain.do_not_specialize == ()
    assert isinstance(stable, Jit)
    assert stable.do_not_specialize == ("n",)


@needs_triton
def test_interpreting_leaves_triton_as_it_was() -> None:
    """Triton's interpreter forgets to restore what it patched for its own library's functions (here ``tl.zeros``)."""
    import triton.language as tl

    places = (tl, tl.core, tl.math, tl.standard, tl.tensor)
    before = [dict(vars(place)) for place in places]
    test_expand_idx_mapping.check(implementation(expand_idx_mapping, "interpret"))
    for place, names in zip(places, before, strict=True):
        assert [name for name, value in names.items() if vars(place)[name] is not value] == []


def test_without_triton_every_load_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op, "_PREPARED", set())
    monkeypatch.setitem(sys.modules, "triton", None)
    kernel = _op.Jit(checksum.kernel.fn)
    for _ in range(2):
        with pytest.raises(_op.TritonMissing, match="pip install triton"):
            kernel.load()
