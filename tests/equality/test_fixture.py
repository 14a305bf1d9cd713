"""The shipped model against logits that Hugging Face made on a CPU: here, and on a GPU in float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Arrival, Workload
from mrv2lab.model.load import CHECKPOINTS
from mrv2lab.protocol import SamplingParams
from tests.equality import make_fixture
from tests.equality.compare import FLOAT32_BOUND, bfloat16_figures, no_further_off, off_by
from tests.equality.harness import run_workload
from tests.equality.make_fixture import FIXTURE, Fixture
from tests.slow import mostly_slow

gpu = pytest.mark.gpu
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
# Whole prompts, chunks, and one token a step for everybody: the shape of a decode step.
each_chunk = pytest.mark.parametrize("chunk", mostly_slow([16, 0, 1], 2))
REMEDY = "; run `python -m tests.equality.make_fixture`"


@pytest.fixture(scope="module")
def fixture() -> Fixture:
    assert FIXTURE.exists(), f"{FIXTURE} is missing{REMEDY}"
    made = make_fixture.read()
    assert made.sha256 == make_fixture.sha256_of_weights(), (
        f"{FIXTURE.name} was made from other weights than the shipped model has now{REMEDY}"
    )
    return made


def ours(fixture: Fixture, device: str, dtype: Any, chunk: int) -> torch.Tensor:
    """[n, V]: every row as the logits behind the one token of a request of its own, all in one burst.

    The longest goes twice, since a request that is alone takes no chunks.
    """
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    prompts = [*fixture.prompts, max(fixture.prompts, key=len)]
    workload = Workload(tuple(Arrival(0, prompt, params) for prompt in prompts))
    options: dict[str, Any] = {"num_blocks": 1024, "block_size": 8, "long_prefill_token_threshold": chunk}
    with Engine("tiny", device=device, dtype=dtype, enable_prefix_caching=False, **options) as engine:
        trace = run_workload(engine, workload)
    assert max(count for step in trace.steps for count in step.counts) == chunk or not chunk
    return torch.cat([trace.logits[f"w{i}"] for i in range(len(fixture.prompts))])


@torch.inference_mode()
def theirs(fixture: Fixture, device: str, dtype: torch.dtype) -> torch.Tensor:
    """[n, V]: transformers on this machine, in ``dtype``."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        CHECKPOINTS / "tiny", dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    model = model.to(device).eval()
    rows = [
        model(input_ids=torch.tensor([sequence], device=device), use_cache=False).logits[0, positions].cpu()
        for sequence, positions in zip(fixture.sequences, fixture.positions.tolist(), strict=True)
    ]
    return torch.cat(rows)


def test_small_and_whole(fixture: Fixture) -> None:
    assert FIXTURE.stat().st_size < 300_000
    assert bool(torch.isfinite(fixture.rows).all())
    assert len({len(prompt) for prompt in fixture.prompts}) > 20


def test_stale_weights_are_noticed(fixture: Fixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """What is written is what is read, and the sum is over the file's bytes."""
    make_fixture.write(fixture, tmp_path / "again.npz")
    again = make_fixture.read(tmp_path / "again.npz")
    assert (again.sha256, again.versions, again.sequences) == (fixture.sha256, fixture.versions, fixture.sequences)
    assert np.array_equal(again.positions, fixture.positions)
    assert torch.equal(again.logits, fixture.logits)
    (tmp_path / "w").write_bytes(b"other weights")
    monkeypatch.setattr(make_fixture, "WEIGHTS", tmp_path / "w")
    assert make_fixture.sha256_of_weights() != fixture.sha256


@each_device
def test_transformers_in_float32_made_it(fixture: Fixture, device: str) -> None:
    """So the figures below are ours, and not the machine's or the version's."""
    ratios = off_by(theirs(fixture, device, torch.float32), fixture.rows)
    print(f"\ntransformers, float32 on {device}: worst {ratios.max():.2g}")
    assert ratios.max() <= FLOAT32_BOUND / 10


@each_chunk
@each_device
def test_float32(fixture: Fixture, device: str, chunk: int) -> None:
    ratios = off_by(ours(fixture, device, "float32", chunk), fixture.rows)
    print(f"\nfloat32 on {device}, chunk {chunk}: {len(ratios)} rows, worst {ratios.max():.2g}")
    assert (ratios <= FLOAT32_BOUND).all()  # false for NaN


@each_chunk
@each_device
def test_bfloat16(fixture: Fixture, device: str, chunk: int) -> None:
    """2e-2 max|ref| a row; where transformers' own bfloat16 on this machine is further off, no further than that."""
    got = off_by(ours(fixture, device, "bfloat16", chunk), fixture.rows)
    other = off_by(theirs(fixture, device, torch.bfloat16), fixture.rows)
    print(f"\nbfloat16 on {device}, chunk {chunk}: {bfloat16_figures(got, other)}")
    no_further_off(got, other)
