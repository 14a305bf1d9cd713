"""Run a decoder alone, without scheduler and runner: token sequences through a paged cache, in chunks."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.attention import make_backend
from mrv2lab.config import ModelConfig, RunnerConfig
from mrv2lab.model.decoder import Decoder
from mrv2lab.model.products import Products
from mrv2lab.protocol import CommonAttentionMetadata, ForwardInputs
from mrv2lab.runtime import Runtime, make_runtime

BLOCK_SIZE = 8

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
    ),
]
"""For ``parametrize``."""


def runtime(device: str) -> Runtime:
    """A runtime whose float32 products are float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return make_runtime(RunnerConfig(device=device))


@torch.inference_mode()
def all_logits(
    rt: Runtime,
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    sequences: list[list[int]],
    chunk: int,
    products: Products | None = None,
) -> list[torch.Tensor]:
    """Logits [len, V] of every sequence. A step takes the next ``chunk`` tokens of each that has any left.

    Blocks are shuffled, and every slot of the pool holds NaN until it is written.
    """
    tokens = chunk * len(sequences)
    decoder = Decoder(config, weights, rt, max_num_tokens=tokens, products=products)
    needed = [-(-len(sequence) // BLOCK_SIZE) for sequence in sequences]
    dtype = getattr(torch, config.dtype)
    shape = (sum(needed) + 1, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)

    def cache(layer: int, kind: str) -> torch.Tensor:
        return rt.adopt(torch.full(shape, float("nan"), dtype=dtype), f"{kind}.{layer}")

    decoder.bind_kv_cache([(cache(i, "key"), cache(i, "value")) for i in range(config.num_hidden_layers)])
    builder = make_backend(rt).builder(config.kv_groups[0])
    order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)) + 1).tolist()
    blocks = [[order.pop() for _ in range(n)] for n in needed]
    done = [0] * len(sequences)
    result: list[list[torch.Tensor]] = [[] for _ in sequences]
    step = 0
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        live = [j for j, sequence in enumerate(sequences) if done[j] < len(sequence)]
        counts = [min(chunk, len(sequences[j]) - done[j]) for j in live]
        positions = [p for j, n in zip(live, counts, strict=True) for p in range(done[j], done[j] + n)]
        owner = [j for j, n in zip(live, counts, strict=True) for _ in range(n)]
        slots = [
            blocks[j][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for j, p in zip(owner, positions, strict=True)
        ]
        starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
        lens = torch.tensor([done[j] + n for j, n in zip(live, counts, strict=True)], dtype=torch.int32)
        table = torch.zeros(len(live), max(needed), dtype=torch.int32)
        for row, j in enumerate(live):
            table[row, : needed[j]] = torch.tensor(blocks[j])
        ids = torch.tensor([sequences[j][p] for j, p in zip(owner, positions, strict=True)], dtype=torch.int32)
        named = {"starts": starts, "lens": lens, "table": table, "slots": torch.tensor(slots), "ids": ids}
        on = {name: rt.adopt(value, f"{name}.{step}") for name, value in named.items()}
        common = CommonAttentionMetadata(
            query_start_loc=on["starts"],
            query_start_loc_np=starts.numpy(),
            seq_lens=on["lens"],
            seq_lens_np_upper_bound=lens.numpy(),
            num_reqs=len(live),
            num_tokens=len(positions),
            max_query_len=max(counts),
            max_seq_len=int(lens.max()),
            block_table=on["table"],
            slot_mapping=on["slots"],
        )
        where = rt.adopt(torch.tensor(positions), f"positions.{step}")
        decoder.forward(ForwardInputs(on["ids"], where, (builder.build(common),)))
        every = rt.adopt(torch.arange(len(positions)), f"rows.{step}")
        logits = rt.read(decoder.compute_logits(every, len(positions))).cpu()
        for row, j in enumerate(owner):
            result[j].append(logits[row])
        for j, n in zip(live, counts, strict=True):
            done[j] += n
        step += 1
    return [torch.stack(rows) for rows in result]


def assert_near_class(got: torch.Tensor, want: torch.Tensor, bound: float = 1e-3) -> None:
    """DESIGN.md's near class: max|d| <= bound * max|ref| in every row. NaN fails."""
    error = (got.float() - want.float()).abs().amax(-1)
    assert bool((error <= bound * want.float().abs().amax(-1)).all()), f"worst row {error.max().item():.3g}"
