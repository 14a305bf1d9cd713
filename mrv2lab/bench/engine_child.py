"""One engine in a process of its own that answers, line by line, what the race asks of it.

``python -m mrv2lab.bench.engine_child IMPL SETTINGS`` imports, says ``{"ready": ...}`` and then answers one JSON object
for each that it reads, until its input ends. What libraries print goes to the error stream.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any, Protocol

from mrv2lab.bench.engine_workloads import RaceWorkload

MODULES = {
    "mrv2lab": "mrv2lab.bench.engine_ours",
    "vllm": "mrv2lab.bench.engine_vllm",
    "transformers": "mrv2lab.bench.engine_transformers",
}


class Contestant(Protocol):
    """An engine that is up. ``facts`` say how it was built."""

    facts: dict[str, Any]

    def prepare(self, workload: RaceWorkload, sampling: str, repetition: int) -> Any:
        """Prompts and parameters; not timed."""

    def generate(self, prepared: Any) -> list[list[int]]:
        """Every request's new tokens, on the host; timed."""


def run(contestant: Contestant, message: dict[str, Any]) -> dict[str, Any]:
    """One repetition. Raises ``RuntimeError`` where a request did not bring what it was asked for."""
    workload = RaceWorkload(**message["workload"])
    prepared = contestant.prepare(workload, message["sampling"], message["repetition"])
    gc.collect()  # the garbage of the repetition before is not this one's
    start = time.perf_counter()
    outputs = contestant.generate(prepared)
    seconds = time.perf_counter() - start
    lengths = {len(tokens) for tokens in outputs}
    if len(outputs) != workload.requests or lengths != {workload.output_len}:
        raise RuntimeError(
            f"{len(outputs)} requests with {sorted(lengths)} tokens came back, {workload.requests} with "
            f"{workload.output_len} were asked for"
        )
    return {
        "seconds": seconds,
        "distinct_tokens": len({token for tokens in outputs for token in tokens}),
        "first_tokens": outputs[0][:8],
    }


def serve(impl: str, settings: dict[str, Any], lines: Any, answer: Any) -> None:
    """Answer until ``lines`` end. The first line asks for the engine, since building it takes the GPU."""
    contestant: Any = None

    def reply(made: dict[str, Any]) -> None:
        answer.write(json.dumps(made) + "\n")
        answer.flush()

    try:
        module = importlib.import_module(MODULES[impl])
        reply({"ready": module.versions()})
    except Exception as error:  # a peer's import fails in many ways, and that is an answer
        reply({"absent": f"{type(error).__name__}: {error}"})
        return
    for line in lines:
        message = json.loads(line)
        try:
            if message["do"] == "build":
                start = time.perf_counter()
                contestant = module.build(settings)
                reply({**contestant.facts, "start_s": time.perf_counter() - start})
            elif message["do"] == "run":
                reply(run(contestant, message))
            else:
                reply(getattr(contestant, message.pop("do"))(**message))
        except Exception as error:
            traceback.print_exc()
            reply({"failed": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Keep the real output for answers, and serve."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], json.loads(sys.argv[2]), sys.stdin, answer)
    answer.flush()
    sys.stderr.flush()
    os._exit(0)  # peers leave threads and processes behind that would keep this one


if __name__ == "__main__":
    main()
