"""A notebook drives the step explorer on a live engine; every panel's data equals a readback of the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrv2lab.recording.recording import Recording

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
STEPS = 50

CELLS = [
    """
from mrv2lab import SamplingParams, StepExplorer
from mrv2lab.engine.engine import Engine
from tests.engine.small import MODEL
from tests.recording.runs import SIZES, Capture, Run
from tests.recording.test_view import CHECKS

model, sizes = (MODEL, SIZES)
engine = Engine(model, device={device!r}, async_scheduling=False, **sizes)
explorer = StepExplorer(engine, top_k=3)
explorer
""",
    """
import numpy as np

source = explorer.sources[0]
rng = np.random.default_rng(3)
live, owners, logits = [], [], []
while len(live) < {steps}:
    if rng.random() < 0.8 and len(engine.scheduler.requests) < 9:
        prompt = rng.integers(10, 61, int(rng.integers(1, 20))).tolist()
        params = SamplingParams(max_tokens=int(rng.integers(6, 26)), temperature=float(rng.integers(0, 2)))
        engine.submit(prompt, params)
    known = len(source)
    said = explorer.advance("step")
    assert said is None or said.startswith("nothing to do"), said
    if len(source) == known:
        continue
    assert len(source) == known + 1 and explorer.index == known
    runner = engine.worker.runner
    live.append({{name: engine.rt.read(t).numpy() for name, t in runner.tables().items()}})
    owners.append(dict(runner.req_states.req_id_to_index))
    batch = engine.core.last_schedule.total_num_scheduled_tokens
    logits.append(engine.rt.read(runner.logits).float().cpu().numpy() if batch else None)
assert engine.scheduler.stats.num_preemptions, "the pool was not tight"
""",
    """
from mrv2lab.observer import WAITS

recording = engine.observer.recorder.recording
run = Run(recording.header, recording.steps, live, owners, {{token: f"<{{token}}>" for token in range(61)}})
recording.texts.update(run.texts)
for index in range({steps}):
    explorer.index = index
    view = explorer.view
    assert view.meta["live"] and view.meta["mode"] == "record", view.meta["mode"]
    for check in CHECKS:
        check(run, index, view)
    step = recording[index]
    if logits[index] is not None:
        top = np.sort(logits[index], axis=1)[:, :-4:-1]
        assert np.array_equal(np.array(view.meta["top_k"]["logits"], np.float32), top), index
        assert [ids for ids in view.meta["sampled"]] == step.sampled
    waits = [mark["name"] for mark in view.meta["marks"] if mark["wait"] or mark["kind"] in WAITS]
    assert all(name.startswith("sampled.") or name in ("device", "main", "copy") for name in waits), waits
print({steps}, "steps compared on", recording.header.device)
""",
    """
recording.save({path!r})
explorer.close()
assert not engine.observer.enabled
engine.close()
""",
]


def run_notebook(device: str, path: Path) -> Any:
    notebook = nbformat.v4.new_notebook()
    for source in CELLS:
        text = source.strip("\n").format(device=device, steps=STEPS, path=str(path))
        notebook.cells.append(nbformat.v4.new_code_cell(text))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"import sys; sys.path.insert(0, {str(ROOT)!r})"))
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": ROOT}}
    )
    return client.execute()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_panel_of_a_live_engine_equals_a_readback(device: str, tmp_path: Path) -> None:
    path = tmp_path / "live.mrv2rec"
    executed = run_notebook(device, path)
    said = "".join(output.get("text", "") for output in executed.cells[3].outputs)
    assert f"{STEPS} steps compared on" in said
    shown = executed.cells[1].outputs[-1].data
    assert "application/vnd.jupyter.widget-view+json" in shown
    assert {"text/html", "text/plain"} <= shown.keys()
    recording = Recording.load(path)
    assert len(recording) == STEPS
    assert recording.header.modelled == (device == "cpu")
    assert recording.verify() == []
