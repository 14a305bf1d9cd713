"""``mrv2lab twin``: random workloads through two runners, until the first difference.

Imports without torch, as everything that ``mrv2lab --help`` loads.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

if TYPE_CHECKING:
    from mrv2lab.config import RunnerConfig

SIDES: dict[str, dict[str, Any]] = {
    "mrv2": {"runner": "mrv2"},
    "v1": {"runner": "v1", "reorder": "mrv2"},
    "v1-unordered": {"runner": "v1"},
}
"""What a side may be. V1 asks for MRV2's batch order, so that every bit can agree; unordered, it is compared near."""


def twin(
    a: Annotated[str, typer.Option(help=f"Who drives: {', '.join(SIDES)}.")] = "v1",
    b: Annotated[str, typer.Option(help="Who is held against it.")] = "mrv2",
    workloads: Annotated[int, typer.Option(help="Random workloads; 200 hold every pair of settings.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Draws settings and workloads.", min=0)] = 0,
    sampling: Annotated[
        str, typer.Option(help="'plain': temperature, seed and stop tokens; 'all': every sampling parameter.")
    ] = "plain",
    device_a: Annotated[str, typer.Option(help="'auto', 'cpu' or 'cuda'.")] = "cpu",
    device_b: Annotated[str | None, typer.Option(help="As a's where it is left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Run random workloads on two runners behind one scheduler and stop at the first difference.

    Each workload draws its loop, and each side its own stream, lag and transfer policy (all but 'unsafe'). Exit code 1
    if they differ.
    """
    try:
        sides = _side(a, device_a), _side(b, device_b or device_a)
        facts = run_workloads(*sides, workloads=workloads, seed=seed, sampling=sampling)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        typer.echo(f"mrv2lab: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
    if as_json:
        typer.echo(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode())
    else:
        verdict = "are equal" if facts["equal"] else "differ"
        counts = "{workloads} workloads, {steps} steps, {rows} rows, {tokens} tokens, {excused} excused".format(**facts)
        typer.echo(f"{a} and {b} {verdict} ({facts['equality']}): {counts}")
        if facts["difference"] is not None:
            typer.echo(f"workload {facts['workloads'] - 1}: {facts['difference']['text']}")
        elif not facts["equal"]:
            typer.echo("more tokens are excused than chance explains" if facts["steps"] else "nothing was compared")
    if not facts["equal"]:
        raise typer.Exit(1)


def _side(name: str, device: str) -> RunnerConfig:
    from mrv2lab.config import RunnerConfig

    if name not in SIDES:
        raise ValueError(f"a side of a twin is one of {', '.join(SIDES)}, got {name!r}")
    return RunnerConfig(device=device, **SIDES[name])


def run_workloads(
    a: RunnerConfig, b: RunnerConfig, *, workloads: int, seed: int, sampling: str = "plain"
) -> dict[str, Any]:
    """What the command prints: ``equal``, ``steps``, further counts, and the first difference or None.

    ``equal`` is false too where more than 0.5 % of the tokens had to be excused, and where no step had tokens.
    """
    try:
        from mrv2lab.check.compare import NearReport
        from mrv2lab.check.side import weights_of
        from mrv2lab.check.workloads import MODEL, run_twin, twin_cases
    except ImportError as error:
        missing = error.name or error
        raise RuntimeError(
            f"a twin runs models and needs {missing}; in a checkout: pip install -e '.[engine]'"
        ) from error

    near, steps, weights = NearReport(), 0, weights_of(MODEL)
    for done, case in enumerate(twin_cases(workloads, seed, sampling=sampling), 1):  # noqa: B007
        report = run_twin(case, a, b, weights=weights)
        near += report.near
        steps += report.steps
        if report.difference is not None:
            break
    found = report.difference
    return {
        "equal": found is None and steps > 0 and not near.too_many_excused,
        "steps": steps,
        "difference": None if found is None else dataclasses.asdict(found) | {"text": str(found)},
        "setting": None if found is None else case.setting,
        "equality": report.equality,
        "workloads": done,
        "rows": near.rows,
        "tokens": near.tokens,
        "excused": near.excused,
    }
