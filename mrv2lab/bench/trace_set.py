"""The traces that ship in ``traces/``: one workload, both runners, four transfer policies, profiled and recorded.

``python -m mrv2lab.bench.trace_set --device cuda --out traces``  Qwen3-0.6B's shape, 64 requests that decode
``python -m mrv2lab.bench.trace_set --device cpu --out FOLDER``   the shipped model; device times modelled

``eager``: ``PREFIX_SETTING.json.gz`` and, of MRV2, ``PREFIX_SETTING.mrv2rec`` of a second run, since the recorder's own
host time does not belong into a profile. ``graphs``: ``PREFIX_SETTING_graphs.json.gz``, a decode's forward pass being
one replay. ``late``: ``PREFIX_SETTING_late.json.gz``, a stand-in for a larger model being in front of each step's
copies, so that whoever must wait for one is seen to wait; on a GPU with graphs, since eager launches under a profiler
keep the host busy for longer than any stand-in.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from tqdm.auto import tqdm

from mrv2lab.bench.policy_bench import StepTimer
from mrv2lab.bench.stand_in import StandIn
from mrv2lab.config import QWEN3_0_6B
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Workload, burst
from mrv2lab.recorder.profile import profile
from mrv2lab.recorder.run import record_run, write_sidecar
from mrv2lab.recorder.side_by_side import drive

SETTINGS: dict[str, dict[str, Any]] = {
    "v1_barrier": {"runner": "v1", "transfer": "barrier"},
    "mrv2_pinned_copy": {"runner": "mrv2", "transfer": "pinned_copy"},
    "mrv2_uva_pool": {"runner": "mrv2", "transfer": "uva_pool"},
    "mrv2_unsafe": {"runner": "mrv2", "transfer": "unsafe"},
}
LATE = ("v1_barrier", "mrv2_pinned_copy")
"""Settings that are profiled behind the stand-in too."""
KINDS = ("eager", "graphs", "late")
PRIVATE = ("host_name", "traceName", "trace_id")
"""What a profiler says of the machine that is nobody's business, or differs from run to run for nothing."""
WARMUP = 6


def write_set(
    folder: Path, device: str, *, requests: int, steps: int, stand_in_ms: float = 5.0, kinds: Sequence[str] = KINDS
) -> list[Path]:
    """Profile and record every setting into ``folder``; the files written. ``steps`` are profiled, behind a warm-up.

    Raises ``ValueError`` for a kind that there is not."""
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"a kind is one of {KINDS}, got {sorted(unknown)}")
    on_gpu = device == "cuda"
    prompt_len = 128 if on_gpu else 32
    workload = burst(requests, prompt_len=prompt_len, max_tokens=WARMUP + steps + 16)
    options: dict[str, Any] = {
        "device": device,
        "num_blocks": requests * ((prompt_len + WARMUP + steps + 16) // 16 + 2) + 1,
        "max_num_reqs": requests,
        "max_model_len": 2048 if on_gpu else 512,
        "max_num_batched_tokens": requests * prompt_len,
    }
    graphs = {"cudagraph_mode": "full_decode_only", "cudagraph_capture_sizes": (requests,), "warm_up": False}
    prefix = "h200" if on_gpu else "cpu"
    written: list[Path] = []
    cases = [(name, kind) for kind in KINDS if kind in kinds for name in (LATE if kind == "late" else SETTINGS)]
    for name, kind in tqdm(cases, desc="settings"):
        chosen = options | SETTINGS[name] | (graphs if kind == "graphs" or (kind == "late" and on_gpu) else {})
        with Engine(QWEN3_0_6B if on_gpu else "tiny", progress=False, **chosen) as engine:
            stem = folder / f"{prefix}_{name}{'' if kind == 'eager' else f'_{kind}'}"
            with _late_copies(engine, stand_in_ms) if kind == "late" else _as_it_is():
                path = Path(f"{stem}.json.gz")
                with profile(engine, warmup=WARMUP, path=path, record=False, title=stem.name) as profiled:
                    drive(engine, workload, steps=WARMUP + steps)
            scrub(path)
            written += [path, write_sidecar(path, profiled.trace)]
            if SETTINGS[name]["runner"] == "mrv2" and kind == "eager":
                written += _record(engine, workload, Path(f"{stem}.mrv2rec"), WARMUP + steps)
    return written


def _record(engine: Engine, workload: Workload, path: Path, steps: int) -> list[Path]:
    engine.reset()
    recording = record_run(engine, workload, path, steps=steps, progress=False)
    return [path, write_sidecar(path, recording)]


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _late_copies(engine: Engine, stand_in_ms: float) -> Iterator[None]:
    """Queue the stand-in where a step begins to edit its state: in front of its copies, behind the last output."""
    queue: Callable[[], None] = StandIn(engine.rt, stand_in_ms).queue
    before, engine.observer = engine.observer, StepTimer(engine.rt.now, queue)
    try:
        yield
    finally:
        engine.observer = before


def scrub(path: Path) -> None:
    """Take the machine's name out of a profiler's file; the same events give the same bytes."""
    text = path.read_bytes()
    found = orjson.loads(gzip.decompress(text))
    for key in PRIVATE:
        found.pop(key, None)
    path.write_bytes(gzip.compress(orjson.dumps(found), 9, mtime=0))


app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="folder for the files")],
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    requests: Annotated[int, typer.Option(min=1)] = 64,
    steps: Annotated[int, typer.Option(min=1)] = 8,
    stand_in_ms: Annotated[float, typer.Option(min=0.1)] = 5.0,
    kind: Annotated[
        list[str] | None, typer.Option(help="eager, graphs or late; several times; all by default.")
    ] = None,
) -> None:
    """Write the traces and recordings that ship."""
    out.mkdir(parents=True, exist_ok=True)
    for path in write_set(out, device, requests=requests, steps=steps, stand_in_ms=stand_in_ms, kinds=kind or KINDS):
        print(f"{path.stat().st_size:>10,}  {path.name}")


if __name__ == "__main__":
    app()
