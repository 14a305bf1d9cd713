"""One step through three builders, and the picture of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mrv2lab.config import ModelConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams
from mrv2lab.teach.attention_lesson import StepMetadata, metadata_of_next_step
from mrv2lab.teach.attention_pictures import BEHIND, READ, STALE, pages_picture

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=16,
    max_position_embeddings=64,
    sliding_window=6,
    layer_types=("full_attention", "sliding_attention"),
)


@pytest.fixture(scope="module")
def step() -> Iterator[tuple[StepMetadata, ...]]:
    """Request 0 decodes its 22nd token, request 1 prefills 5; blocks of 4."""
    with Engine(MODEL, device="cpu", max_num_reqs=4, num_blocks=32, block_size=4, max_model_len=48) as engine:
        engine.submit(list(range(1, 21)), SamplingParams(max_tokens=8, ignore_eos=True))
        engine.step()
        engine.step()
        engine.submit(list(range(30, 35)), SamplingParams(max_tokens=8, ignore_eos=True))
        yield metadata_of_next_step(engine)


def test_the_step(step: tuple[StepMetadata, ...]) -> None:
    full, sliding = step
    assert (full.group.window, sliding.group.window) == (None, 6)
    for one in step:
        assert one.seq_lens.tolist() == [22, 5]
        assert one.query_lens.tolist() == [1, 5]
        assert one.pages_in_use() == [6, 2]
    assert full.first_visible_page() == [0, 0]
    assert full.page_starts.tolist() == [0, 6, 8]
    assert full.page_indices.tolist() == [*full.block_table[0, :6].tolist(), *full.block_table[1, :2].tolist()]
    # The query at 21 sees from 16 on: block 4.
    assert sliding.first_visible_page() == [4, 0]
    assert sliding.page_starts.tolist() == [0, 2, 4]
    assert sliding.page_indices.tolist() == [
        *sliding.block_table[0, 4:6].tolist(),
        *sliding.block_table[1, :2].tolist(),
    ]


def test_the_table_has_a_column_a_backend(step: tuple[StepMetadata, ...]) -> None:
    table = step[1].table
    assert list(table.columns) == ["torch", "triton", "flashinfer"]
    assert table.loc["seq_lens"].tolist() == ["int32[2], device: 22, 5"] * 2 + [""]
    assert table.loc["indptr_np"].tolist() == ["", "", "int32[3], host: 0, 2, 4"]
    assert table.loc["kind", "flashinfer"] == "prefill"
    assert table.loc["max_query_len"].tolist() == ["5", "5", ""]


def test_the_picture_says_what_is_read(step: tuple[StepMetadata, ...]) -> None:
    figure = pages_picture(step[1])
    shown = {(trace.name, trace.yaxis): len(trace.x) for trace in figure.data}
    assert shown == {(BEHIND, "y"): 4, (READ, "y"): 4, (STALE, "y"): 16, (READ, "y2"): 4}
    assert "a window of 6 tokens" in figure.layout.title.text
    assert BEHIND not in {trace.name for trace in pages_picture(step[0]).data}
    assert len({trace.marker.symbol for trace in figure.data}) == 3, "colour is not the only cue"


def test_the_engine_goes_on(step: tuple[StepMetadata, ...]) -> None:
    """A tapped step changes no text."""
    texts = []
    for tapped in (False, True):
        with Engine(MODEL, device="cpu", num_blocks=32, block_size=4, max_model_len=48) as engine:
            name = engine.submit(list(range(1, 21)), SamplingParams(max_tokens=8, ignore_eos=True))
            if tapped:
                metadata_of_next_step(engine)
            while engine.has_work():
                engine.step()
            texts.append(engine.output(name).token_ids)
    assert texts[0] == texts[1]


def test_refusals() -> None:
    with (
        Engine(MODEL, device="cpu", num_blocks=32, block_size=4, max_model_len=48) as engine,
        pytest.raises(ValueError, match="it had no tokens, or replayed a full graph"),
    ):
        metadata_of_next_step(engine)
    with (
        Engine("tiny", device="cpu", runner="v1", num_blocks=32) as engine,
        pytest.raises(ValueError, match="use runner='mrv2'"),
    ):
        metadata_of_next_step(engine)
