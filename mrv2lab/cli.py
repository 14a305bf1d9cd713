"""``mrv2lab generate`` and ``mrv2lab info``."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import orjson
import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """A workbench around a real LLM inference runner: step it, look at it, profile it."""


@app.command()
def generate(
    prompt: Annotated[list[str], typer.Option(help="Text to continue; give it several times for a batch.")],
    model: Annotated[str, typer.Option(help="'tiny', 'smollm2', a preset, a Hugging Face folder or a .gguf file.")] = (
        "tiny"
    ),
    device: Annotated[str, typer.Option(help="'auto', 'cpu' or 'cuda'.")] = "auto",
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Fixes the draws of every prompt.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the end-of-text token.")] = False,
    transfer: Annotated[str, typer.Option(help="'unsafe', 'barrier', 'pinned_copy' or 'uva_pool'.")] = "uva_pool",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, one a line.")] = False,
) -> None:
    """Generate text with the MRV2 runner."""
    try:
        from mrv2lab.engine.engine import Engine
    except ImportError as error:
        _fail(f"generating text needs {error.name or error}; in a checkout: pip install -e '.[engine]'")
    from mrv2lab.protocol import SamplingParams

    try:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos)
        with Engine(model, device=device, transfer=transfer) as engine:  # type: ignore[arg-type]
            outputs = engine.generate(prompt, params)
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        _fail(error)
    for output in outputs:
        if as_json:
            line = {
                "prompt": output.prompt,
                "token_ids": output.token_ids,
                "text": output.text,
                "finish_reason": output.finish_reason,
                "steps": output.steps,
            }
            typer.echo(orjson.dumps(line).decode())
        else:
            typer.echo(f"{output.prompt}{output.text}")


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
) -> None:
    """What machine this is, which backend an engine would use, what is missing and how to get it."""
    from mrv2lab.bench.machine import describe_machine

    facts = describe_machine()
    if as_json:
        typer.echo(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode())
        return
    table = Table(title="mrv2lab", show_header=False)
    for name, value in facts.items():
        if name != "missing":
            table.add_row(name, "-" if value is None else str(value))
    console = Console()
    console.print(table)
    missing: dict[str, str] = facts["missing"]
    for name, remedy in missing.items():
        console.print(f"missing: {name} - {remedy}", markup=False, soft_wrap=True)
    if not missing:
        console.print("nothing is missing")


def _fail(error: Exception | str) -> NoReturn:
    """One line on stderr, whatever the message looked like, and the exit code of wrong usage."""
    typer.echo(f"mrv2lab: {' '.join(str(error).split())}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    app()
