"""The benchmark of graphs writes rows that the picture draws."""

from __future__ import annotations

from pathlib import Path

import orjson
import pandas as pd
import pytest

from mrv2lab.bench.graph_bench import main
from mrv2lab.teach.graph_pictures import launch_picture


@pytest.mark.slow
def test_rows_and_captures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(tmp_path / "graphs.json", model="tiny", requests="1,2", steps=2)
    figures = orjson.loads((tmp_path / "graphs.json").read_bytes())["figures"]
    assert [(row["requests"], row["way"]) for row in figures["rows"]] == [
        (count, way) for way in ("eager", "pieces", "graph") for count in (1, 2)
    ]
    assert [line.name for line in launch_picture(pd.DataFrame(figures["rows"])).data] == ["eager", "pieces", "graph"]
    whole, both = figures["captures"]
    assert whole["shapes"] == whole["graphs"] == len(whole["by_shape"])
    assert both["graphs"] > both["shapes"] > whole["shapes"]
    assert whole["nbytes"] > 0 and whole["seconds"] > 0 and whole["dropped"] == {}
    assert "2 requests, graph" in capsys.readouterr().out
