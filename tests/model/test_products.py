"""Every way to compute a layer's products gives the model's logits; the token count alone says which one is taken."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mrv2lab.config import QWEN3_0_6B, ModelConfig, RunnerConfig
from mrv2lab.model.products import EARLY, FEW, FEWEST, LIBRARY, PLANS, Plan, Products, Split, matvec_tile
from mrv2lab.model.weights_random import random_weights
from mrv2lab.ops import _pdl
from mrv2lab.runtime import make_runtime
from tests.model.decoding import all_logits, assert_near_class, runtime

CONFIG = ModelConfig(
    vocab_size=53,
    hidden_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=72,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    qk_norm=True,
    architecture="Qwen3ForCausalLM",
)
SEQUENCES = [[(5 * i * i + 3 * j) % 53 for i in range(n)] for j, n in enumerate((9, 1, 6))]
TILE = (16, 16, 16, 4, 2)
SPLIT = Plan(Split(TILE), Split(TILE, 2), Split(TILE), Split(TILE, 3))
WAYS = {
    "few": {"few": 100},
    "split": {"plans": {100: SPLIT}},
    "o_proj by the library": {"plans": {100: SPLIT._replace(o_proj=None)}},
    "down by the library": {"plans": {100: SPLIT._replace(down=None)}},
    "qkv and gate_up by the library": {"plans": {100: SPLIT._replace(qkv=None, gate_up=None)}},
    "by token count": {"few": 2, "plans": {4: SPLIT}},
}


@pytest.fixture(scope="module")
def weights():
    return random_weights(CONFIG)


@pytest.fixture(scope="module")
def wanted(weights):
    return all_logits(runtime("cpu"), CONFIG, weights, SEQUENCES, 16)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_logits_are_the_same(way, chunk, weights, wanted):
    products = Products("spec", CONFIG, **WAYS[way])
    got = all_logits(runtime("cpu"), CONFIG, weights, SEQUENCES, chunk, products)
    for ours, want in zip(got, wanted, strict=True):
        assert_near_class(ours, want)


@pytest.mark.parametrize("way", ["few", "split"])
def test_interpreted_kernels(way, weights, wanted):
    """All of them in one decoder of one layer, on three tokens."""
    pytest.importorskip("triton")
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    one = {name: tensor for name, tensor in weights.items() if ".layers.1." not in name and ".layers.2." not in name}
    rt = make_runtime(RunnerConfig(device="cpu", kernels="interpret"))
    products = Products("interpret", config, **WAYS[way])
    got = all_logits(rt, config, one, [SEQUENCES[0][:2], SEQUENCES[2][:1]], 2, products)
    want = all_logits(runtime("cpu"), config, one, [SEQUENCES[0][:2], SEQUENCES[2][:1]], 2)
    for ours, theirs in zip(got, want, strict=True):
        assert_near_class(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("way", WAYS)
def test_logits_are_the_same_on_a_gpu(way, chunk, weights, wanted):
    """In bfloat16, no further off than the library's way is from float32, times two."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    wide = {name: tensor.float() for name, tensor in rounded.items()}
    exact = all_logits(runtime("cpu"), CONFIG, wide, SEQUENCES, 64)

    def off(products: Products) -> float:
        got = all_logits(runtime("cuda"), config, rounded, SEQUENCES, chunk, products)
        pairs = zip(got, exact, strict=True)
        return max(float(((g.float() - w).abs().amax(-1) / w.abs().amax(-1)).max()) for g, w in pairs)

    assert off(Products("triton", config, **WAYS[way])) <= 2 * off(Products("triton", config, plans={}, few=0)) <= 0.2


def test_choice_by_token_count():
    products = Products("triton", QWEN3_0_6B)
    plans = PLANS[1024, 4096, 2048, 3072]
    largest = max(plans)
    for t in range(FEWEST + 1, largest + 1):
        assert products.plan(t) == plans[min(limit for limit in plans if limit >= t)]
    assert products.plan(largest + 1) is LIBRARY
    splits = max(split.splits for plan in plans.values() for split in (plan.o_proj, plan.down) if split)
    assert products.partials_shape == (splits, largest)


def test_early_starts_by_token_count():
    """Where a plan or the matrix-vector kernels are, up to EARLY; with other shapes only the latter."""
    products, other = (Products("triton", dataclasses.replace(QWEN3_0_6B, intermediate_size=i)) for i in (3072, 3328))
    split = Products("triton", QWEN3_0_6B, plans={16: SPLIT, 20: LIBRARY, 512: SPLIT})
    for t in range(1, 600):
        assert products.starts_early(t) == (t <= 128)
        assert other.starts_early(t) == (t <= FEW)
        assert split.starts_early(t) == (t <= 16 or 20 < t <= EARLY)
        assert not Products("triton", CONFIG).starts_early(t)  # float32


def test_one_token_count_of_every_kind():
    products = Products("triton", QWEN3_0_6B)
    assert products.kinds(8192) == (1, 2, 3, 17, 33, 65, 129)
    assert products.kinds(64) == (1, 2, 3, 17, 33)
    assert Products("triton", QWEN3_0_6B, plans={}, few=4).kinds(8192) == (1, 2, 3, 5)
    assert Products("triton", QWEN3_0_6B, plans={512: SPLIT}).kinds(8192) == (1, 2, 3, 129, 513)
    assert Products("spec", QWEN3_0_6B).kinds(8192) == (1,)


class OnGpu:
    """As much of a CUDA tensor as an early start asks about."""

    is_cuda = True
    device = torch.device("cuda", 0)


def check_pace(products: Products) -> None:
    """A segment of t rows launches early exactly where ``starts_early`` says so, and leaves nothing behind."""
    seen: list[dict[str, bool]] = []
    run = products.paced(lambda rows: seen.append(_pdl.early_start(OnGpu())))
    for t in (1, 3, 128, 129, 512, 2):
        run(torch.empty(t, 1))
        assert seen[-1]["PDL"] == products.starts_early(t), t
        assert _pdl.early_start(OnGpu())["PDL"]
        with _pdl.without_early_start():
            run(torch.empty(t, 1))
        assert not seen[-1]["PDL"]


def test_segments_start_early_by_their_rows(monkeypatch):
    monkeypatch.setattr(_pdl, "_capable", {0: True})
    check_pace(Products("triton", QWEN3_0_6B))


def test_mutant_a_pace_that_all_segments_share(monkeypatch):
    monkeypatch.setattr(_pdl, "_capable", {0: True})
    monkeypatch.setattr(Products, "paced", lambda self, segment: segment)
    with pytest.raises(AssertionError, match="129"):
        check_pace(Products("triton", QWEN3_0_6B))


def test_early_starts_are_held_back_no_longer_behind_an_error(monkeypatch):
    monkeypatch.setattr(_pdl, "_capable", {0: True})

    def fail(rows: torch.Tensor) -> None:
        raise KeyError("of a segment")

    with pytest.raises(KeyError):
        Products("triton", QWEN3_0_6B).paced(fail)(torch.empty(300, 1))
    assert _pdl.early_start(OnGpu())["PDL"]


@pytest.mark.parametrize("backend", ["spec", "interpret"])
def test_cpu_takes_the_library(backend):
    products = Products(backend, QWEN3_0_6B)
    assert products.plan(16) is LIBRARY
    assert products.partials_shape is None


def test_float32_and_other_shapes_take_the_library():
    for change in ({"dtype": "float32"}, {"intermediate_size": 3328}):
        assert Products("triton", dataclasses.replace(QWEN3_0_6B, **change)).partials_shape is None


@pytest.mark.parametrize(
    ("k", "count", "tile"),
    [(1024, 1, (4, 1)), (1024, 2, (2, 1)), (3072, 1, (1, 1)), (4096, 2, (1, 2)), (14_336, 1, (1, 4)), (8, 1, (512, 1))],
)
def test_matvec_tile_fills_the_registers(k, count, tile):
    assert matvec_tile(torch.empty(1, k), count) == tile


@pytest.mark.parametrize("where", ["o_proj", "down"])
def test_the_comparison_sees_a_pending_sum_left_out(where, weights, wanted, monkeypatch):
    """A norm that takes a split product for one that lies in ``hidden``."""
    products = Products("spec", CONFIG, plans={100: SPLIT})
    add_norm = products._add_norm
    pending = getattr(SPLIT, where)
    monkeypatch.setattr(
        products, "_add_norm", lambda *args: add_norm(*args[:-1], None if args[-1] == pending else args[-1])
    )
    got = all_logits(runtime("cpu"), CONFIG, weights, SEQUENCES, 16, products)
    with pytest.raises(AssertionError, match="worst row"):
        assert_near_class(got[0], wanted[0])
