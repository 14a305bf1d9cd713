"""What graphs save and what they cost: host time of launching a decode step's forward, eagerly, in pieces and whole,
beside the step; and memory and time of the captures.

    python -m mrv2lab.bench.graph_bench --out FILE [--model qwen3-0.6b-shape]

``rows`` feed ``teach.graph_pictures.launch_picture``. Bench and lesson share their measurement (``launch_share``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mrv2lab.bench.result import write_result
from mrv2lab.config import PRESETS
from mrv2lab.engine.engine import Engine
from mrv2lab.teach.graph_lesson import WAYS, launch_share


def capture_cost(model: Any, mode: str, **options: Any) -> dict[str, Any]:
    """Shapes, graphs, launches, bytes and seconds of every shape of the default sizes."""
    with Engine(model, cudagraph_mode=mode, progress=False, **options) as engine:
        report = engine.worker.runner.graphs.report()
        return {
            "mode": mode,
            "shapes": len(report.captured),
            "graphs": sum(one.graphs for one in report.captured),
            "launches": sum(one.launches for one in report.captured),
            "nbytes": report.nbytes,
            "seconds": report.seconds,
            "dropped": {str(descriptor): reason for descriptor, reason in report.dropped.items()},
            "by_shape": report.rows(),
        }


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    model: Annotated[str, typer.Option(help="tiny, or a preset's name")] = "qwen3-0.6b-shape",
    requests: Annotated[str, typer.Option(help="batch sizes")] = "1,2,4,8,16,32,64,128,256",
    steps: Annotated[int, typer.Option(help="decode steps a batch size")] = 40,
) -> None:
    """Measure and write."""
    counts = tuple(int(count) for count in requests.split(","))
    options = {
        "max_num_reqs": max(counts),
        "max_num_batched_tokens": max(2048, max(counts)),
        "max_model_len": 512,
        "num_blocks": 16 * max(counts) + 1,
    }
    made = PRESETS.get(model, model)
    frame = launch_share(counts, model=made, steps=steps, ways=tuple(WAYS), **options)
    costs = [capture_cost(made, mode, **options) for mode in ("full_decode_only", "full_and_piecewise")]
    for row in frame.itertuples():
        print(f"{row.requests:>4} requests, {row.way:<9} {row.forward_us:8.1f} of {row.step_us:8.1f} us a step")
    for cost in costs:
        print(f"{cost['mode']}: {cost['graphs']} graphs, {cost['nbytes'] / 2**20:.1f} MiB, {cost['seconds']:.2f} s")
    write_result(out, "graphs", {"model": model, "rows": frame.to_dict("records"), "captures": costs})


if __name__ == "__main__":
    typer.run(main)
