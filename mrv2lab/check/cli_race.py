"""``mrv2lab race``: one transfer policy under the race detector."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import orjson
import typer


def race(
    policy: Annotated[str, typer.Option(help="'unsafe', 'barrier', 'pinned_copy' or 'uva_pool'.")] = "unsafe",
    depth: Annotated[
        int | None,
        typer.Option(help="Slots of each UVA pool ('uva_pool' only; 2 unless given); two steps are in flight."),
    ] = None,
    stream: Annotated[str, typer.Option(help="'deferred' or 'threaded' (software streams), or 'cuda'.")] = "deferred",
    steps: Annotated[int, typer.Option(help="Turns of the engine.")] = 30,
    runner: Annotated[str, typer.Option(help="'mrv2' or 'v1'.")] = "mrv2",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Does the host overwrite what the device has yet to read? Prints corrupted steps, hazards and waits."""
    try:
        from mrv2lab.check.race_lab import race as run_race
    except ImportError as error:
        _fail(f"the race lab needs {error.name or error}; in a checkout: pip install -e '.[engine]'")
    try:
        report = run_race(policy, depth=2 if depth is None else depth, where=stream, steps=steps, runner=runner)  # type: ignore[arg-type]
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        _fail(error)
    if depth is not None and policy != "uva_pool":
        typer.echo(f"mrv2lab: --depth changes nothing here: '{policy}' has no pool, only 'uva_pool' has.", err=True)
    facts: dict[str, Any] = {
        "policy": report.policy,
        "depth": report.depth,
        "stream": report.where,
        "runner": report.runner,
        "steps": report.steps,
        "corrupted_steps": report.corrupted_steps,
        "hazards": [
            {name: getattr(hazard, name) for name in "buffer step kind reader writer between changed".split()}
            for hazard in report.hazards
        ],
        "wait_ns": report.wait_ns,
        "waits": report.waits.to_dict("index"),
        "wrong_tokens": {str(step): count for step, count in report.wrong_tokens.items()},
        "error": report.error,
    }
    if as_json:
        typer.echo(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode())
        return
    modelled = " (modelled)" if stream == "deferred" else ""
    typer.echo(f"{policy} on {stream}, {report.steps} steps")
    typer.echo(f"corrupted steps: {len(report.corrupted_steps)} {report.corrupted_steps}")
    typer.echo(f"wrong tokens:    {sum(report.wrong_tokens.values())}")
    typer.echo(f"hazards:         {len(report.hazards)}")
    for line in report.buffer_lines():
        typer.echo(f"    {line}")
    typer.echo(f"waited:          {report.wait_ns / 1e6:.3f} ms{modelled} beside the waits for the output")
    if report.error is not None:
        typer.echo(f"ended early:     {report.error}")


def _fail(error: Exception | str) -> Any:
    """One line on stderr and the exit code of wrong usage."""
    typer.echo(f"mrv2lab: {' '.join(str(error).split())}", err=True)
    sys.exit(2)
