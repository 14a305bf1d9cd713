"""``%load_ext mrv2lab`` and then ``%%record``: record what a cell lets an engine do, without a change to the cell."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from mrv2lab.observer import WAITS
from mrv2lab.recording.schema import RecordingError

if TYPE_CHECKING:
    from mrv2lab.engine.engine import Engine
    from mrv2lab.recording.recording import Recording


@magics_class
class RecordMagics(Magics):
    """The project's magics; ``register`` puts them into a shell."""

    @magic_arguments()
    @argument("name", nargs="?", default="recording", help="variable that gets the Recording (default: recording)")
    @argument("-e", "--engine", metavar="NAME", help="variable of the engine, where there is more than one")
    @argument("-o", "--output", metavar="FILE", help="write the recording to FILE as the cell runs")
    @argument("--top-k", type=int, default=0, metavar="K", help="keep the K greatest logits of each row (default: 0)")
    @argument(
        "--check-every",
        type=int,
        default=16,
        metavar="N",
        help="compare the state with a device checksum every N steps, 0 = never (default: 16)",
    )
    @cell_magic
    def record(self, line: str, cell: str) -> None:
        """Record what this cell lets an engine do: no wait is added, and the tokens stay the same.

        The steps of the cell become a Recording, which StepExplorer shows. If the cell raises, what ran before is kept.
        """
        shell = self.shell
        assert shell is not None
        args = parse_argstring(self.record, line)
        name = _free_name(args.name, args.engine)
        engine = _find_engine(shell.user_ns, args.engine)
        from mrv2lab.recorder.recorder import Recorder  # torch is there: somebody made an engine

        try:
            recorder = Recorder(engine, args.output, top_k=args.top_k, check_every=args.check_every)
            recorder.__enter__()
        except (OSError, RecordingError, RuntimeError, ValueError) as error:
            raise UsageError(f"%%record: {_one_line(error)}") from None
        result: Any = None
        # The shell looks for a silencing semicolon at the end of the whole cell, where there is none.
        silent = DisplayHook.semicolon_at_end_of_expression(cell)
        try:
            result = shell.run_cell(f"{cell}\npass" if silent else cell)
        finally:
            try:
                recorder.__exit__(None, None, None)
            except (OSError, RecordingError) as error:
                raise UsageError(f"%%record: the recording could not be written: {_one_line(error)}") from None
        shell.user_ns[name] = recorder.recording
        said = summary(name, recorder.recording, args.output)
        if not result.success:  # its traceback is shown; this stops "Run All" as the cell alone would
            raise UsageError(f"{said}; the cell broke off")
        print(said)


def summary(name: str, recording: Recording, path: str | None = None) -> str:
    """One line: ``recording: 7 steps, 2 requests, 7 waits (7 for outputs), in memory``."""
    requests = {req_id for step in recording for req_id in step.req_ids}
    waits = [mark for step in recording for mark in step.marks if mark.kind in WAITS and not mark.added]
    outputs = sum(mark.phase == "wait_output" for mark in waits)
    return (
        f"{name}: {_count(len(recording), 'step')}, {_count(len(requests), 'request')}, {_count(len(waits), 'wait')} "
        f"({outputs} for outputs), in {path or 'memory'}"
    )


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _free_name(name: str, engine: str | None) -> str:
    if not name.isidentifier():
        raise UsageError(f"%%record: {name!r} cannot be a variable's name")
    if name == engine:
        raise UsageError(f"%%record: {name!r} is the engine; give the recording another name")
    return name


def _find_engine(namespace: dict[str, Any], name: str | None) -> Engine:
    """The engine that is meant. Raises ``UsageError`` for none or several."""
    loaded = sys.modules.get("mrv2lab.engine.engine")  # without it there cannot be one
    kind: Any = loaded.Engine if loaded is not None else ()
    if name is not None:
        if name not in namespace or not isinstance(namespace[name], kind):
            what = "is not defined" if name not in namespace else f"is no Engine but a {type(namespace[name]).__name__}"
            raise UsageError(f"%%record: -e {name}: {name} {what}")
        return namespace[name]  # type: ignore[no-any-return]
    named: dict[int, str] = {}
    for variable, value in namespace.items():  # Out and its relatives begin with an underscore
        if isinstance(value, kind) and not variable.startswith("_") and not value._closed:
            named.setdefault(id(value), variable)
    if not named:
        raise UsageError('%%record: there is no Engine in this notebook; make one first: engine = Engine(model="tiny")')
    if len(named) > 1:
        raise UsageError(f"%%record: there are several engines, {', '.join(sorted(named.values()))}; say -e NAME")
    return namespace[next(iter(named.values()))]  # type: ignore[no-any-return]


def register(shell: InteractiveShell) -> None:
    """Put the magics into ``shell``. Again is harmless."""
    shell.register_magics(RecordMagics)
