"""What reading a trace costs, beside HolisticTraceAnalysis on the same files, and for large files on our own.

``python -m mrv2lab.bench.trace_bench --out FILE --peer-python PYTHON TRACE...``

Reading traces
    Each reading is a process of its own, so that its peak of memory is its own; ours and HTA's take turns, after a turn
    of each that is not counted and that only fills the caches of files. ``import`` is what a session pays once,
    ``work`` is the load and the analyses: ours are syncs, gaps and queue depth; HTA's are idle time breakdown, queue
    length summary and launch statistics. Of waits HTA has its critical path only, which the uncounted turn tries:
    ``more_of_peer`` says what that took, or how it failed. ``cpu`` figures count the process's own processor time,
    which other processes of the machine disturb less. Memory is that of the whole process: ``imports_mb`` is what
    interpreter and libraries take, most of it where a trace is small, and ``over_imports_mb`` what came on top.

    HTA reads a folder and wants a rank in the file. Both read a copy in a folder of its own; where the file names no
    rank, ``"distributedInfo": {"rank": 0}`` is put in front of the copy, and its row says so. HTA rounds times to whole
    microseconds (starts up, ends down), so its idle times are a little longer than ours.

    The synthetic files are those of the tests; they need a checkout.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm.auto import tqdm

from mrv2lab.bench.result import summary, write_result

CHILD = Path(__file__).with_name("trace_child.py")
MORE = ("temporal breakdown", "critical path")
TIMES_FASTER = 5.0
SHARE_OF_MEMORY = 0.5
RAW_BYTES = 55_000_000
EVENTS = 1_000_000
LIMITS: dict[str, dict[str, float]] = {
    "raw": {"load_s": 3.0, "peak_mb": 500.0},
    "large": {"load_s": 15.0, "peak_over_raw": 4.0},
    "large, from the copy": {"load_s": 1.0},
}
"""What our reader may take: a file of RAW_BYTES, one of EVENTS, and the same from its columnar copy."""

_RANK = re.compile(rb'"rank":\s+\d')  # as HTA looks for it


def read_once(python: str, who: str, what: str, file: Path) -> dict[str, Any]:
    """What ``trace_child`` printed, and ``process_s``. If it died, raises ``RuntimeError`` with its last words."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if who == "ours":
        env["PYTHONPATH"] = str(Path(__file__).parents[2])
    begin = time.perf_counter()
    # -P: this folder's modules must not stand in for libraries of the same name.
    done = subprocess.run([python, "-P", str(CHILD), who, what, str(file)], env=env, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise RuntimeError(f"{who} could not {what} {file.name}: {last[0][:300]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "process_s": seconds}


def why_no_peer(python: str | None) -> str:
    """Why HTA cannot take part; empty if it can."""
    if python is None:
        if importlib.util.find_spec("hta") is not None:
            return ""
        return "HolisticTraceAnalysis is not installed here; --peer-python names an interpreter that has it"
    if shutil.which(python) is None:
        return "the interpreter that --peer-python names is not there"
    done = subprocess.run([python, "-P", "-c", "import hta.trace_analysis"], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1:]
    return f"HolisticTraceAnalysis cannot be imported there: {last[0][:200] if last else ''}" if done.returncode else ""


def prepared(file: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A copy that HTA can read, alone in a folder, and facts of the file."""
    folder.mkdir()
    content = file.read_bytes()
    is_packed = content.startswith(b"\x1f\x8b")
    text = gzip.decompress(content) if is_packed else content
    facts: dict[str, Any] = {"file": file.name, "bytes": len(content), "raw_bytes": len(text), "rank_added": False}
    if _RANK.search(text) is None and text.lstrip().startswith(b"{"):
        facts["rank_added"] = True
        text = text.replace(b"{", b'{"distributedInfo": {"rank": 0},\n', 1)
        content = gzip.compress(text, 6) if is_packed else text
    copy = folder / file.name
    copy.write_bytes(content)
    return copy, facts


def _cost(readings: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds and megabytes of some readings of one kind."""
    stages = [name for name in readings[0]["seconds"] if name != "import"]
    names = ("import_s", "work_s", "work_cpu_s", "process_s", "peak_mb", "imports_mb", "over_imports_mb")
    columns: dict[str, list[float]] = {name: [] for name in names}
    for one in readings:
        columns["import_s"].append(one["seconds"]["import"])
        columns["work_s"].append(sum(one["seconds"][name] for name in stages))
        columns["work_cpu_s"].append(sum(one["cpu_seconds"][name] for name in stages))
        columns["process_s"].append(one["process_s"])
        columns["peak_mb"].append(one["peak_bytes"][stages[-1]] / 1e6)
        columns["imports_mb"].append(one["peak_bytes"]["import"] / 1e6)
        columns["over_imports_mb"].append((one["peak_bytes"][stages[-1]] - one["peak_bytes"]["import"]) / 1e6)
    return {
        **{name: summary(values) for name, values in columns.items()},
        "stages_s": {name: statistics.median(one["seconds"][name] for one in readings) for name in stages},
    }


def _beside(row: dict[str, Any], readings: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """How we compare: medians over medians, and the least and greatest of single turns."""
    cost, peer = row["ours"], row["peer"]
    faster = peer["work_s"]["median"] / cost["work_s"]["median"]
    share = cost["peak_mb"]["median"] / peer["peak_mb"]["median"]
    turns = zip(readings["ours"], readings["peer"], strict=True)
    single = [_cost([his])["work_s"]["median"] / _cost([mine])["work_s"]["median"] for mine, his in turns]
    return {
        "times_faster": faster,
        "times_faster_by_turn": [min(single), max(single)],
        "times_faster_in_cpu": peer["work_cpu_s"]["median"] / cost["work_cpu_s"]["median"],
        "times_faster_with_imports": peer["process_s"]["median"] / cost["process_s"]["median"],
        "share_of_memory": share,
        "share_of_memory_over_imports": cost["over_imports_mb"]["median"] / peer["over_imports_mb"]["median"],
        "fast_enough": faster >= TIMES_FASTER,
        "small_enough": share <= SHARE_OF_MEMORY,
    }


def compare(file: Path, folder: Path, peer_python: str, no_peer: str, repeats: int) -> dict[str, Any]:
    """One file's row."""
    copy, row = prepared(file, folder)
    row["findings"] = {}
    pythons = {"ours": sys.executable} if no_peer else {"ours": sys.executable, "peer": peer_python}
    if no_peer:
        row["peer"] = {"failed": no_peer}
    readings: dict[str, list[dict[str, Any]]] = {}
    for who, python in pythons.items():
        try:
            first = read_once(python, who, "all", copy)
        except RuntimeError as error:
            row[who] = {"failed": str(error)}
            continue
        failed = {name: text for name, text in first["failed"].items() if name not in MORE}
        row[who] = {"versions": first["versions"], "failed": failed}
        row["findings"][who] = first["found"]
        if who == "peer":
            row["more_of_peer"] = {
                name: first["failed"].get(name, first["seconds"][name]) for name in MORE if name in first["seconds"]
            }
        if "load" not in failed:
            readings[who] = []
    for _ in range(repeats):
        for who in readings:
            readings[who].append(read_once(pythons[who], who, "analyse", copy))
    for who, found in readings.items():
        row[who] |= _cost(found)
    if len(readings) == 2:
        row["ours_beside_peer"] = _beside(row, readings)
    return row


def time_alone(name: str, file: Path, what: str, repeats: int) -> dict[str, Any]:
    """Our reader's row for one large file."""
    raw = file.stat().st_size
    if what == "cached":
        made = read_once(sys.executable, "ours", what, file)  # writes the copy
    readings = [read_once(sys.executable, "ours", what, file) for _ in range(repeats)]
    cost = _cost(readings)
    peak = cost["peak_mb"]
    row = {
        "raw_bytes": raw,
        "events": readings[0]["found"]["events"],
        "failed": readings[0]["failed"],
        "load_s": cost["work_s"],
        "load_cpu_s": cost["work_cpu_s"],
        "peak_mb": peak,
        "peak_over_raw": peak["median"] * 1e6 / raw,
        "over_imports_mb": cost["over_imports_mb"],
        "limits": LIMITS[name],
    }
    if what == "cached":
        row["load_and_write_copy_s"] = made["seconds"]["load"]
        row["copy_bytes"] = sum(one.stat().st_size for one in file.parent.glob(file.name + ".*"))
    reached = {"load_s": row["load_s"]["median"], "peak_mb": peak["median"], "peak_over_raw": row["peak_over_raw"]}
    row["met"] = {key: reached[key] <= limit for key, limit in LIMITS[name].items()}
    return row


def bench(
    files: list[Path], peer_python: str | None, repeats: int, raw_bytes: int = RAW_BYTES, events: int = EVENTS
) -> dict[str, Any]:
    """All rows."""
    try:
        from tests.trace.synthetic import synthetic_kineto, write_synthetic
    except ImportError as error:
        raise RuntimeError("the synthetic traces are made by the tests: run this in a checkout's folder") from error
    no_peer = why_no_peer(peer_python)
    figures: dict[str, Any] = {
        "repeats": repeats,
        "load_average_before": os.getloadavg(),
        "peer": no_peer or "HolisticTraceAnalysis",
        "wanted": {"times_faster": TIMES_FASTER, "share_of_memory": SHARE_OF_MEMORY},
        "files": [],
        "alone": {},
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        per_event = len(synthetic_kineto(2000)) / 2000
        raw = write_synthetic(folder / "synthetic.json", round(raw_bytes / per_event))
        for number, file in enumerate(tqdm([*files, raw], desc="files")):
            row = compare(file, folder / str(number), peer_python or sys.executable, no_peer, repeats)
            shutil.rmtree(folder / str(number))
            figures["files"].append(row)
        figures["alone"]["raw"] = time_alone("raw", raw, "load", repeats)
        raw.unlink()
        large = write_synthetic(folder / "large.json", events)
        figures["alone"]["large"] = time_alone("large", large, "load", repeats)
        figures["alone"]["large, from the copy"] = time_alone("large, from the copy", large, "cached", repeats)
    figures["load_average_after"] = os.getloadavg()
    return figures


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    files: Annotated[list[Path] | None, typer.Argument(help="Traces that both read, besides a synthetic one.")] = None,
    peer_python: Annotated[str | None, typer.Option(help="Interpreter with HolisticTraceAnalysis.")] = None,
    repeats: Annotated[int, typer.Option(help="Counted readings of each file by each.")] = 5,
) -> None:
    """Run the benchmark."""
    write_result(out, "traces_cpu", bench(files or [], peer_python, repeats))
    typer.echo(out.read_text())


if __name__ == "__main__":
    typer.run(main)
