"""V1's dispatcher beside MRV2's manager."""

from __future__ import annotations

import pytest

from mrv2lab.config import GraphConfig, SchedulerConfig
from mrv2lab.teach.graph_contrast import contrast_picture, differing, dispatch_contrast, run_both, structure


def test_where_they_differ() -> None:
    """R = 6 lies between two sizes: V1 has no full graph for 5 and 6 decodes, MRV2 has one of 6."""
    scheduler = SchedulerConfig(max_num_reqs=6, max_num_batched_tokens=64)
    frame = dispatch_contrast(GraphConfig("full_and_piecewise"), scheduler)
    assert list(frame[frame["batch"] == "decodes"]["tokens"]) == [1, 2, 3, 4, 5, 6]
    found = differing(frame)[["batch", "tokens", "v1", "v1_padded", "mrv2", "mrv2_padded"]]
    assert found.values.tolist() == [
        ["decodes", 5, "piecewise", 8, "full", 6],
        ["decodes", 6, "piecewise", 8, "full", 6],
    ]
    mixed = frame[frame["batch"] == "mixed"].set_index("tokens")
    assert (mixed.loc[5, "v1"], mixed.loc[5, "v1_padded"]) == ("piecewise", 8)
    assert "exceed the largest capture size 8" in mixed.loc[9, "v1_why"] and mixed.loc[9, "mrv2"] == "eager"


@pytest.mark.parametrize("mode", ["piecewise", "full_decode_only", "full_and_piecewise"])
def test_where_r_is_a_size_they_do_the_same(mode: str) -> None:
    graphs = GraphConfig(mode, (1, 2, 4, 8, 16))  # type: ignore[arg-type]
    frame = dispatch_contrast(graphs, SchedulerConfig(max_num_reqs=8, max_num_batched_tokens=64))
    assert len(frame) > 20 and not len(differing(frame))


def test_the_same_run_under_both() -> None:
    frame = run_both(device="cpu")
    v1, mrv2 = frame.loc["v1"], frame.loc["mrv2"]
    assert v1["text"] == mrv2["text"]
    same = ["full", "piecewise", "eager", "tokens", "padding"]
    assert list(v1[same]) == list(mrv2[same]) and v1["padding"] > 0
    assert mrv2["tail_launches"] == 0 < v1["tail_launches"] <= v1["full"] + v1["piecewise"]


def test_pictures_and_words() -> None:
    scheduler = SchedulerConfig(max_num_reqs=6, max_num_batched_tokens=64)
    frame = dispatch_contrast(GraphConfig("full_and_piecewise"), scheduler)
    assert "differ at 2 of 6 token counts" in contrast_picture(frame).layout.title.text
    assert [trace.name for trace in contrast_picture(frame, "mixed").data] == ["no padding", "V1", "MRV2"]
    with pytest.raises(ValueError, match="batch must be one of"):
        contrast_picture(frame, "prefill")
    assert list(structure().columns) == ["V1", "MRV2"]
