"""``mrv2lab generate``, ``record``, ``inspect``, ``info``, ``race``, ``twin``, ``memory``, ``trace`` and ``bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import orjson
import typer
from rich.console import Console
from rich.table import Table

from mrv2lab.bench.cli_engine import engine
from mrv2lab.bench.cli_sampler import sampler
from mrv2lab.check.cli_memory import memory
from mrv2lab.check.cli_race import race
from mrv2lab.check.cli_twin import twin
from mrv2lab.trace.cli import trace_app
from mrv2lab.trace.screen import plain

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
    top_k: Annotated[int, typer.Option(help="Draw from this many most likely tokens; 0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens that reach this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Draw from tokens at least this fraction as likely as the first.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends it; may be given several times.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities of each token and of this many most likely ones.")
    ] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="The text is JSON that fits this schema: a file, or the schema itself.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The text matches this regular expression.")] = None,
    runner: Annotated[str, typer.Option(help="'mrv2' or 'v1'.")] = "mrv2",
    transfer: Annotated[
        str | None,
        typer.Option(help="'unsafe', 'barrier', 'pinned_copy' or 'uva_pool'; else the runner's own."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, one a line.")] = False,
) -> None:
    """Generate text with either runner, V1 or MRV2."""
    try:
        from mrv2lab.engine.engine import Engine
    except ImportError as error:
        _fail(f"generating text needs {error.name or error}; in a checkout: pip install -e '.[engine]'")
    from mrv2lab.protocol import SamplingParams, StructuredOutput

    try:
        schema = json_schema if json_schema is None else _text_or_file(json_schema)
        structured = schema is not None or regex is not None
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop=tuple(stop or ()),
            logprobs=logprobs,
            structured_output=StructuredOutput(json_schema=schema, regex=regex) if structured else None,
        )
        with Engine(model, runner, device=device, transfer=transfer) as engine:  # type: ignore[arg-type]
            outputs = engine.generate(prompt, params)
        decode = engine.tokenizer.decode if engine.tokenizer is not None else None
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        _fail(error)
    for output in outputs:
        if as_json:
            line: dict[str, Any] = {
                "prompt": output.prompt,
                "token_ids": output.token_ids,
                "text": output.text,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "steps": output.steps,
            }
            if output.logprobs is not None:
                line["logprobs"] = [
                    [{"token_id": token, **one._asdict()} for token, one in (row or {}).items()]
                    for row in output.logprobs
                ]
            typer.echo(orjson.dumps(line).decode())
            continue
        typer.echo(f"{output.prompt}{output.text}")
        if output.logprobs is not None:
            typer.echo(output.logprobs.to_frame(decode).to_string(index=False, formatters={"text": repr}))


@app.command()
def record(
    out: Annotated[Path, typer.Option(help="File to write; FILE.meta.json beside it says where it came from.")],
    model: Annotated[str, typer.Option(help="'tiny', 'smollm2', a preset, a Hugging Face folder or a .gguf file.")] = (
        "tiny"
    ),
    device: Annotated[str, typer.Option(help="'auto', 'cpu' or 'cuda'.")] = "auto",
    workload: Annotated[Path | None, typer.Option(help="Requests as CSV; else a burst of random prompts.")] = None,
    requests: Annotated[int, typer.Option(help="Of the burst.")] = 8,
    prompt_len: Annotated[int, typer.Option(help="Of the burst.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Of the burst.")] = 64,
    temperature: Annotated[float, typer.Option(help="Of the burst; 0 = greedy.")] = 0.0,
    steps: Annotated[int | None, typer.Option(help="Turns of the engine; else until every request has ended.")] = None,
    top_k: Annotated[int, typer.Option(help="Logits kept a row; 0 = none.")] = 0,
    device_times: Annotated[
        str, typer.Option(help="What gets a timing event: 'auto', 'launches', 'phases' or 'none'.")
    ] = "auto",
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of the KV pool; few of them preempt.")] = None,
    max_num_reqs: Annotated[int | None, typer.Option(help="Rows.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens a request may have.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens a step may have.")] = None,
    transfer: Annotated[str, typer.Option(help="'unsafe', 'barrier', 'pinned_copy' or 'uva_pool'.")] = "uva_pool",
) -> None:
    """Run a workload and record it, step by step, to a file that opens on any laptop."""
    try:
        from mrv2lab.engine.engine import Engine
        from mrv2lab.engine.workload import burst, from_csv
        from mrv2lab.recorder.run import record_run, write_sidecar
    except ImportError as error:
        _fail(f"recording needs {error.name or error}; in a checkout: pip install -e '.[engine]'")
    sizes = {
        "num_blocks": num_blocks,
        "max_num_reqs": max_num_reqs,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    try:
        work = (
            from_csv(workload)
            if workload is not None
            else burst(requests, prompt_len=prompt_len, max_tokens=max_tokens, temperature=temperature)
        )
        given = {name: size for name, size in sizes.items() if size is not None}
        with Engine(model, device=device, transfer=transfer, **given) as engine:  # type: ignore[arg-type]
            recording = record_run(engine, work, out, steps=steps, top_k=top_k, device_times=device_times)
        write_sidecar(out, recording)
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        _fail(error)
    typer.echo(f"{out}: {recording!r}, {out.stat().st_size / 1e6:.2f} MB")


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A recording.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """What a recording holds, and whether the state rebuilt from it fits the device's checksums. Needs no PyTorch."""
    from mrv2lab.recording.recording import Recording

    try:
        recording = Recording.load(file)
        differences = recording.verify()
    except (ValueError, OSError) as error:
        _fail(error)
    header = recording.header
    facts = {
        "file": file.name,
        "steps": len(recording),
        "requests": len({request.req_id for step in recording.steps for request in step.new}),
        "preemptions": sum(len(step.preempted) for step in recording.steps),
        "runner": header.runner,
        "device": header.device,
        "mode": header.mode,
        "modelled_times": header.modelled,
        "complete": recording.complete,
        "problems": recording.problems,
        "checked_steps": sum(bool(step.checksums) for step in recording.steps),
        "differences": differences,
    }
    if as_json:
        typer.echo(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode())
        return
    table = Table(title=plain(file.name), show_header=False)
    for name, value in facts.items():
        table.add_row(name, plain("; ".join(value) or "none" if isinstance(value, list) else str(value)))
    Console().print(table)


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


app.command()(race)
app.command()(twin)
app.command()(memory)
app.add_typer(trace_app, name="trace")
bench = typer.Typer(no_args_is_help=True, help="Ours beside its peers, in one run.")
bench.command()(sampler)
bench.command()(engine)
app.add_typer(bench, name="bench")


def _text_or_file(given: str) -> str:
    """``given`` itself if it looks like JSON, else what the file of that name holds."""
    return given if given.lstrip()[:1] in ("{", "[") else Path(given).read_text(encoding="utf-8")


def _fail(error: Exception | str) -> NoReturn:
    """One line on stderr, whatever the message looked like, and the exit code of wrong usage."""
    typer.echo(f"mrv2lab: {plain(' '.join(str(error).split()))}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    app()
