"""Greedy rows: ties, NaN, -inf, padding rows, odd vocabularies, strides; int64 offsets (mrv2.md #39)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops import argmax
from mrv2lab.ops.argmax import argmax_blocks, argmax_rows, num_blocks, reduce_blocks
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant, poisoned, run

INF = float("inf")


class Now:
    """A runtime that runs at once."""

    def __init__(self, backend):
        self.backend = backend

    def kernel(self, op, *args):
        run(op, args, self.backend)


def greedy(backend, logits, mapping=None, block=4096):
    n, vocab = logits.shape
    blocks = num_blocks(vocab, block)
    out = poisoned(n, dtype=torch.int64)
    local = poisoned(n, blocks, dtype=torch.float32), poisoned(n, blocks)
    mapping = torch.arange(n, dtype=torch.int32) if mapping is None else torch.tensor(mapping, dtype=torch.int32)
    argmax_rows(Now(backend), out, *local, logits, mapping)
    return out.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("vocab", [1, 7, 1000, 1025])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_first_largest_logit(backend, dtype, vocab, rows):
    made = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-9, 9, (rows, vocab + 5), generator=made).to(dtype)[:, 2 : vocab + 2]  # strided, many ties
    want = logits.float().numpy().argmax(axis=1).tolist()
    assert greedy(backend, logits) == want
    assert greedy(backend, logits, block=512) == want


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_rows(backend):
    nan = float("nan")
    rows = {
        (nan, 1.0, 3.0, 2.0, 3.0): 2,  # tie: the lowest id
        (5.0, nan, 5.0, 5.0, 5.0): 0,
        (nan, nan, -INF, -7.0, nan): 3,  # NaN never wins
        (nan, nan, nan, nan, nan): 0,
        (-INF, -INF, -INF, -INF, -INF): 0,
        (1.0, 2.0, INF, 3.0, INF): 2,
        (-0.0, 0.0, -1.0, -1.0, 0.0): 0,
    }
    logits = torch.tensor(list(rows))
    assert greedy(backend, logits) == list(rows.values())
    assert greedy(backend, logits, block=2) == list(rows.values())  # ties and -inf between blocks
    assert greedy(backend, logits[:3], mapping=[4, -1, 2]) == [2, 0, 3]  # a padding row


def check_ties_between_blocks(apply: Apply) -> None:
    out = poisoned(2, dtype=torch.int64)
    apply(out, torch.tensor([[1.0, 4.0, 4.0], [-INF, -INF, -INF]]), torch.tensor([[5, 9, 17], [0, 8, 16]]))
    assert out.tolist() == [9, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_between_blocks(backend):
    check_ties_between_blocks(implementation(reduce_blocks, backend))


@pytest.mark.parametrize("vocab", [1, 7, 511, 512, 513, 4096, 4097, 8193, 50_257, 151_936])
@pytest.mark.parametrize("block", [1, 512, 4096])
def test_the_block_follows_from_the_shape(vocab, block):
    blocks = num_blocks(vocab, block)
    size = argmax.block_size(vocab, blocks)
    assert size == block or (blocks == 1 and vocab <= size <= block)


def test_an_impossible_shape_is_an_error():
    with pytest.raises(ValueError, match="no power of two divides 100 tokens into 3 blocks"):
        argmax.block_size(100, 3)


def test_no_rows():
    for backend in ("spec", "interpret"):
        assert greedy(backend, torch.empty(0, 10)) == []


# -- #39: rows x V > 2^31 ----------------------------------------------------------------------------------------------
def check_far_row(apply: Apply) -> None:
    """Row 2 starts 2^31 + 16 elements behind the base, which lies in the middle of 4 GB that exist only where written:
    an offset that wraps reads zeros."""
    memory = torch.from_numpy(np.zeros(2**32 + 64, np.int8))
    logits = memory.as_strided((3, 3), (2**30 + 8, 1), storage_offset=2**31)
    logits[2, 1] = 5
    local_max, local_arg = poisoned(3, 1, dtype=torch.float32), poisoned(3, 1)
    apply(local_max, local_arg, logits, torch.tensor([-1, -1, 0], dtype=torch.int32))
    assert local_arg.tolist() == [[0], [0], [1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_beyond_2_to_31(backend):
    check_far_row(implementation(argmax_blocks, backend))


@pytest.mark.parametrize(
    ("op", "old", "new", "check"),
    [
        (reduce_blocks, "local_max.numpy().argmax(axis=1)", "local_max.numpy()[:, ::-1].argmax(axis=1)",
         check_ties_between_blocks),
        (reduce_blocks, "best = local_max.numpy().argmax(axis=1)\n",
         "best = local_max.shape[1] - 1 - local_max.numpy()[:, ::-1].argmax(axis=1)\n", check_ties_between_blocks),
    ],
    ids=["a reversed row", "ties to the highest"],
)  # fmt: skip
def test_mutants_of_the_spec(op, old, new, check, tmp_path):
    assert caught(check, implementation(mutant(op, old, new, tmp_path), "spec"))


@pytest.mark.skipif(BACKENDS[1].marks[0].args[0], reason="Triton is not installed")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    row = tl.program_id(0).to(tl.int64)\n    block = tl.program_id(1)\n",
         "    row = tl.program_id(0).to(tl.int32)\n    block = tl.program_id(1)\n"),
        ("row * stride + token", "(row * stride).to(tl.int32) + token"),
    ],
    ids=["int32 row", "int32 offset"],
)  # fmt: skip
def test_int32_offsets_are_caught(old, new, tmp_path):
    assert caught(check_far_row, implementation(mutant(argmax_blocks, old, new, tmp_path), "interpret"))
