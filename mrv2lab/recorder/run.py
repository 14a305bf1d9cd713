"""A workload, recorded to a file with a sidecar that says where it came from: what ``mrv2lab record`` does."""

from __future__ import annotations

import datetime
import hashlib
import shlex
import sys
from pathlib import Path
from typing import Any

import orjson
from tqdm.auto import tqdm

from mrv2lab.bench.machine import describe_machine
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Workload
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recording.recording import Recording
from mrv2lab.trace.sidecar import SIDECAR
from mrv2lab.trace.step_batches import FACTS
from mrv2lab.trace.trace import DEVICE_KINDS, Trace


def record_run(
    engine: Engine,
    workload: Workload,
    path: str | Path,
    *,
    steps: int | None = None,
    progress: bool = True,
    **options: Any,
) -> Recording:
    """Run ``workload`` for ``steps`` turns (None: to its end) and record it to ``path``; ``options`` are Recorder's.

    Requests that are unfinished after ``steps`` turns are aborted behind the recording. Raises ``ValueError`` for fewer
    than 1 step, and as ``engine.submit`` does; what was recorded until then is in the file.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, or None for the whole workload, got {steps}")
    arrivals = list(workload.resolve(engine.config.model.vocab_size))
    started = engine.num_steps
    with (
        Recorder(engine, path, **options) as recorder,
        tqdm(total=steps, desc=workload.name, unit="step", disable=not progress) as bar,
    ):
        while (arrivals or engine.has_work()) and (steps is None or engine.num_steps - started < steps):
            while arrivals and arrivals[0].step <= engine.num_steps - started:
                arrival = arrivals.pop(0)
                assert not isinstance(arrival.prompt, int), "resolve() drew it"
                engine.submit(arrival.prompt, arrival.params, priority=arrival.priority)
            engine.step()
            bar.update()
    for output in list(engine.requests.values()):
        if not output.finished:
            engine.abort(output.request_id)
    return recorder.recording


def write_sidecar(path: str | Path, source: Recording | Trace, licence: str = "Apache-2.0") -> Path:
    """Write ``FILE.meta.json`` beside a recording or a trace: machine, versions, command, commit, date, sha256,
    licence, and what it holds."""
    path = Path(path)
    facts = describe_machine()
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.orig_argv[1:]]
    started = ["mrv2lab", *sys.argv[1:]] if Path(sys.argv[0]).name == "mrv2lab" else ["python", *words]
    meta = {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "bytes": path.stat().st_size,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(started),
        "licence": licence,
        **(_of_trace(source) if isinstance(source, Trace) else _of_recording(source)),
        "machine": {name: value for name, value in facts.items() if name != "missing"},
    }
    sidecar = path.with_name(path.name + SIDECAR)
    sidecar.write_bytes(orjson.dumps(meta, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return sidecar


def _of_recording(recording: Recording) -> dict[str, Any]:
    header = recording.header
    return {
        "steps": len(recording),
        "device": header.device,
        "modelled_times": header.modelled,
        "clock": recording.clock,
    }


def _of_trace(trace: Trace) -> dict[str, Any]:
    names = dict.fromkeys(str(device["name"]) for device in trace.info.devices if device.get("name"))
    return {
        "events": len(trace),
        "device_events": int(trace.mask(*DEVICE_KINDS).sum()),
        "device": ", ".join(names) or "cpu",
        "modelled_times": trace.info.modelled,
        "settings": trace.info.extra.get(FACTS),
    }
