"""The race: our engine beside vLLM's and transformers' on the same requests, one repetition each in turn.

Every engine lives in a process of its own that stays up; at any time one of them works. A repetition is a burst of
requests run to their ends, timed from the first submission to the last token on the host. The turns alternate, so that
the machine's moods fall on all of them, and the order goes round. ``python -m mrv2lab.cli bench engine``.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from mrv2lab.bench.engine_options import allotted
from mrv2lab.bench.engine_over_v1 import over_v1
from mrv2lab.bench.engine_peers import START_S, Child, ChildError, Entrant, entrants
from mrv2lab.bench.engine_vllm import hf_config
from mrv2lab.bench.engine_workloads import RaceWorkload, chosen
from mrv2lab.config import QWEN3_0_6B

ON_GPU: dict[str, Any] = {
    "max_num_reqs": 256,
    "max_num_batched_tokens": 16_384,
    "max_model_len": 4096,
    "num_blocks": 12_288,
    "enable_prefix_caching": False,
    "cudagraph_mode": "full_and_piecewise",
}
"""Our engine's options where the model has Qwen3-0.6B's shape; the peers get the same limits and as many KV bytes."""
ON_CPU: dict[str, Any] = {"enable_prefix_caching": False, "threads": 1}

Walls = dict[tuple[str, str], dict[str, list[dict[str, Any]]]]
"""(workload, sampling) -> entrant -> its answers, one a repetition."""


def settings(on_gpu: bool, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours, and the peers' (see their modules)."""
    if not on_gpu:
        return {"model": "tiny", "device": "cpu", "options": {**ON_CPU, **options}}, {}
    made = {**ON_GPU, **options}
    model = QWEN3_0_6B
    block = made.get("block_size", 16) * 2 * model.kv_size * 2 * model.num_hidden_layers
    theirs = {
        "model": model.name,
        **{name: made[name] for name in ("max_num_reqs", "max_num_batched_tokens", "max_model_len")},
        "kv_bytes": (made["num_blocks"] or 12_288) * block,
    }
    return {"model": model.name, "device": "cuda", "options": made}, theirs


@contextmanager
def assembled(
    wanted: Sequence[Entrant], site: Path | None, logs: Path | None, bar: Any, start_s: float
) -> Iterator[Field]:
    """Everybody who came up; ends their processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = logs or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        model = Path(place) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(hf_config(QWEN3_0_6B)))
        for entrant in wanted:
            if entrant.impl != "mrv2lab":
                entrant.settings["folder"] = str(model)
        children = {entrant.name: Child(entrant, folder, site) for entrant in wanted}
        try:
            yield Field(children, bar, start_s)
        finally:
            for child in children.values():
                child.close()


class Field:
    """The engines that came up within ``start_s`` seconds, and what became of the others."""

    def __init__(self, children: dict[str, Child], bar: Any, start_s: float = START_S) -> None:
        deadline = time.monotonic() + start_s

        def answer(child: Child) -> dict[str, Any]:
            return child.answer(max(1.0, deadline - time.monotonic()))

        self.children = dict(children)
        self.facts: dict[str, dict[str, Any]] = {}
        self.absent: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self._bar = bar
        for name, child in children.items():
            bar.set_postfix_str(f"{name}: imports")
            made = self._try(name, lambda child=child: answer(child))
            if made is None:
                self.absent[name] = self.failed.pop(name)
            elif "absent" in made:
                self.absent[name] = made["absent"]
                del self.children[name]
            else:
                self.facts[name] = {"versions": made["ready"]}
                self._try(name, lambda child=child: child.ask({"do": "build"}) or {})
        for name, child in list(self.children.items()):  # they come up side by side
            bar.set_postfix_str(f"{name}: comes up")
            made = self._try(name, lambda child=child: answer(child))
            if made is not None:
                self.facts[name] |= made

    def _try(self, name: str, ask: Any) -> Any:
        """What ``ask`` returns; None, and no more of that engine, if it raises."""
        try:
            return ask()
        except ChildError as error:
            self.failed[name] = str(error)
            self.children.pop(name).close()
            return None

    def call(self, name: str, message: dict[str, Any]) -> Any:
        """An engine's answer, None from one that fails or has failed before."""
        if name not in self.children:
            return None
        self._bar.set_postfix_str(f"{name}: {message['do']} {message.get('sampling', '')}")
        return self._try(name, lambda: self.children[name].call(message))


def race(
    field: Field,
    cases: Sequence[tuple[RaceWorkload, str]],
    repetitions: int,
    bar: Any,
    in_time: Callable[[], bool] = lambda: True,
) -> Walls:
    """Every engine once without counting, then ``repetitions`` rounds while ``in_time()``; three rounds for an engine
    that takes very long."""
    walls: Walls = {(workload.name, sampling): {} for workload, sampling in cases}
    slow: set[tuple[str, str, str]] = set()
    for repetition in range(repetitions + 1):
        if repetition > 1 and not in_time():
            break
        for workload, sampling in cases:
            names = [name for name, child in field.children.items() if child.entrant.takes(sampling)]
            turn = repetition % len(names) if names else 0
            for name in names[turn:] + names[:turn]:
                if (workload.name, sampling, name) not in slow or repetition <= 3:
                    made = field.call(name, workload.message(sampling, repetition))
                    if made is not None and repetition:
                        walls[workload.name, sampling].setdefault(name, []).append(made)
                        if repetition == 1 and made["seconds"] > 10:  # what compiles in the round before is not slow
                            slow.add((workload.name, sampling, name))
                bar.update()
    return walls


def row(workload: RaceWorkload, sampling: str, entrant: Entrant, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One engine's figures of one workload; ``spread`` is greatest minus least wall, as a share of the median."""
    walls = [one["seconds"] for one in answers]
    median = statistics.median(walls)
    return {
        "workload": workload.name,
        "impl": entrant.impl,
        "runner": entrant.runner,
        "sampling": sampling,
        "output_tokens_per_s": workload.output_tokens / median,
        "ms_per_token": 1e3 * median / workload.output_len,
        "spread": (max(walls) - min(walls)) / median,
        "median_s": median,
        "min_s": min(walls),
        "max_s": max(walls),
        "repetitions": len(walls),
        "walls_s": walls,
        "distinct_tokens": statistics.median_low(one["distinct_tokens"] for one in answers),
        "requests": workload.requests,
        "prompt_len": workload.prompt_len,
        "output_len": workload.output_len,
    }


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our throughput over each other engine's, by workload: of the medians, and least and greatest of single rounds."""
    made = []
    for mine in rows:
        for other in rows:
            same = (mine["workload"], mine["sampling"]) == (other["workload"], other["sampling"])
            ours_first = other["impl"] != "mrv2lab" or (mine["runner"], other["runner"]) == ("mrv2", "v1")
            if not same or mine is other or mine["impl"] != "mrv2lab" or not ours_first:
                continue
            single = [his / own for own, his in zip(mine["walls_s"], other["walls_s"], strict=False)]
            made.append(
                {
                    "workload": mine["workload"],
                    "sampling": mine["sampling"],
                    "of": f"mrv2lab {mine['runner']}",
                    "over": other["impl"] if other["runner"] == "-" else f"{other['impl']} {other['runner']}",
                    "throughput": other["median_s"] / mine["median_s"],
                    "throughput_range": [min(single), max(single)],
                    "ms_per_token": mine["median_s"] / other["median_s"],
                }
            )
    return made


def bench(
    device: str = "auto",
    *,
    workloads: Sequence[str] = (),
    runners: Sequence[str] = ("mrv2", "v1"),
    peers: Sequence[str] = (),
    repetitions: int | None = None,
    compare_runners: bool = True,
    options: dict[str, Any] | None = None,
    limit_s: float = math.inf,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
    vllm_site: Path | None = None,
    logs: Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Run the race. ``workloads`` and ``peers`` empty = all of them; ``compare_runners`` adds ``mrv2_over_v1``. No
    round begins after ``limit_s`` seconds but the first that counts, and engines have 0.6 of them to come up. ``save``
    gets the race's figures before MRV2 over V1 is measured. An option that one runner alone has goes to that one; the
    other's ``options_left_out`` say why.

    Raises ``ValueError`` or ``TypeError``, before any process is started, for an unknown name, an option that no engine
    of ours takes, too few repetitions, no time, and a device or a folder that is not here.
    """
    import torch

    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if device not in ("auto", "cpu", "cuda") or (on_gpu and not torch.cuda.is_available()):
        raise ValueError(f"device {device!r} is not here; use 'auto', 'cpu' or, with an NVIDIA GPU, 'cuda'")
    began = time.monotonic()

    def in_time() -> bool:
        return time.monotonic() - began < limit_s

    repetitions = (9 if on_gpu else 3) if repetitions is None else repetitions
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}")
    if not limit_s > 0:
        raise ValueError(f"limit is a time in seconds and must be positive, got {limit_s:g}")
    if vllm_site is not None and not vllm_site.is_dir():
        raise ValueError(f"vllm_site {vllm_site} is no folder; it holds vLLM's packages")
    cases = chosen(workloads, on_gpu)
    wanted = entrants(runners, peers or ("vllm", "transformers"), {}, {})
    own = [one.runner for one in wanted if one.impl == "mrv2lab"]
    model, base = (QWEN3_0_6B.name, ON_GPU) if on_gpu else ("tiny", ON_CPU)
    given, left_out = allotted(own, model, base, options or {})
    ours, theirs = settings(on_gpu, options or {})
    for one in wanted:
        one.settings.update({**ours, "options": given[one.runner]} if one.impl == "mrv2lab" else theirs)
    absent = {}
    if not on_gpu:
        absent = {one.name: "it runs on an NVIDIA GPU only" for one in wanted if one.impl != "mrv2lab"}
        wanted = [one for one in wanted if one.impl == "mrv2lab"]
    turns = sum(one.takes(sampling) for _, sampling in cases for one in wanted) * (repetitions + 1)
    figures: dict[str, Any] = {"device": "cuda" if on_gpu else "cpu", "model": ours["model"], "peers_limits": theirs}
    bar = tqdm(total=turns, desc="race", unit="turn", disable=not progress)
    with bar, assembled(wanted, vllm_site, logs, bar, min(START_S, 0.6 * limit_s)) as engines:
        walls = race(engines, cases, repetitions, bar, in_time)
        rows = [
            row(workload, sampling, one, walls[workload.name, sampling][one.name])
            for workload, sampling in cases
            for one in wanted
            if walls[workload.name, sampling].get(one.name)
        ]
        figures |= {
            "rows": rows,
            "ratios": ratios(rows),
            "engines": engines.facts,
            "absent": absent | engines.absent,
            "failed": engines.failed,
            "options_left_out": {f"mrv2lab {runner}": why for runner, why in left_out.items()},
        }
        if compare_runners and {"mrv2lab mrv2", "mrv2lab v1"} <= engines.children.keys():
            save(figures)
            figures["mrv2_over_v1"] = over_v1(engines.call, repetitions, on_gpu, bar, in_time)
        figures["seconds"] = time.monotonic() - began
    return figures
