"""The kernel lens as a widget: spec and kernel of an op side by side, and what each program loads and stores.

``recorder.lens.open_lens`` makes one from a recording or a step explorer. The runs travel as columns in custom
messages; only which op and which program is shown is widget state, and so a value in the notebook.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from mrv2lab.recording.lens import Access, Array, LensCalls, LensError, LensRun, Program, SourceText

DENSE = 4096
"""A buffer of at most so many elements travels whole; of a larger one, only what the programs touched."""
TWIN_PROGRAMS = 8
"""How many programs the static twin lists."""
TWIN_ACCESSES = 24
"""How many loads and stores of a program the static twin lists."""


class KernelLens(anywidget.AnyWidget):
    """One op at a time, out of those of a step.

    ``source``: a :class:`LensRun`, or :class:`LensCalls` to choose from, traced when first shown. ``call``: the number
    of the op among them, ``program``: the number of the program; both follow the reader's choice and may be set.
    """

    _esm = Path(__file__).with_suffix(".js")
    call = traitlets.Int(0).tag(sync=True)
    program = traitlets.Int(0).tag(sync=True)

    def __init__(self, source: LensRun | LensCalls, call: int = 0) -> None:
        if isinstance(source, LensRun):
            run = source
            source = LensCalls("", [(run.phase, run.op)], lambda _: run)
        self._source = source
        self._traced: dict[int, LensRun | LensError] = {}
        if source.calls and not 0 <= call < len(source.calls):
            raise ValueError(f"there is no call {call}; there are {len(source.calls)}, from 0")
        super().__init__(call=call)
        self.on_msg(self._on_message)
        self.observe(lambda _: self._send_run(), names="call")

    @property
    def run(self) -> LensRun:
        """The call that is shown. Raises :class:`LensError` where there is none or it cannot be traced."""
        if not self._source.calls:
            raise LensError(self._source.empty)
        if self.call not in self._traced:
            try:
                self._traced[self.call] = self._source.run(self.call)
            except LensError as error:
                self._traced[self.call] = error
        traced = self._traced[self.call]
        if isinstance(traced, LensError):
            raise traced
        return traced

    def close(self) -> None:
        """Remove every view and forget the runs."""
        self._traced.clear()
        super().close()

    @traitlets.validate("call")
    def _call_there(self, proposal: dict[str, Any]) -> int:
        return max(0, min(int(proposal["value"]), len(self._source.calls) - 1))

    @traitlets.validate("program")
    def _program_there(self, proposal: dict[str, Any]) -> int:
        return max(0, int(proposal["value"]))

    def _on_message(self, _: Any, content: Any, buffers: Any) -> None:
        if isinstance(content, dict) and content.get("type") == "ready":
            self._send_run()

    def _send_run(self) -> None:
        """To every view; each asks once when it is made."""
        content: dict[str, Any] = {"type": "lens", "title": self._source.title, "call": self.call}
        content["calls"] = [list(call) for call in self._source.calls]
        buffers: list[bytes] = []
        run = self._run_or_reason()
        if isinstance(run, LensRun):
            content["run"], buffers = payload(run)
        else:
            content["sentence"] = str(run)
        self.send(content, buffers)

    def _run_or_reason(self) -> LensRun | LensError:
        """Never raises: an exception behind a message or in a repr reaches nobody."""
        try:
            return self.run
        except LensError as error:
            return error
        except KeyboardInterrupt:
            return LensError("Interrupted while the kernel was interpreted; choose another op and this one again.")
        except Exception as error:
            return LensError(f"{type(error).__name__}: {error}")

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        run = self._run_or_reason()
        text = f"{run.op}: {run.verdict}" if isinstance(run, LensRun) else str(run)
        bundle[0]["text/plain"] = f"KernelLens({text})"
        bundle[0]["text/html"] = static_twin(run)
        return bundle


# -- what travels -----------------------------------------------------------------------------------------------------
def payload(run: LensRun) -> tuple[dict[str, Any], list[bytes]]:
    """A run for the ES module: a JSON part, and four columns.

    ``index`` int32, ``values`` and ``before`` (0 for loads) 64 bits: the elements of all accesses end to end, an access
    is ``at`` and ``count`` in them. ``dense`` 64 bits: whole buffers before the call, each from its ``offset``. 64 bits
    are an int64, or a float64 where the buffer's ``kind`` is ``float``.
    """
    arrays = {name: value for name, value in run.inputs.items() if isinstance(value, np.ndarray)}
    number = {name: i for i, name in enumerate(arrays)}
    index: list[Array] = []
    values: list[Array] = []
    before: list[Array] = []
    at = 0
    programs: list[dict[str, Any]] = []
    for program in run.programs:
        accesses = []
        for access in program.accesses:
            count = len(access.index)
            said: dict[str, Any] = {
                "store": access.kind == "store",
                "line": access.line,
                "buffer": number[access.buffer],
            }
            accesses.append(said | {"at": at, "count": count})
            index.append(access.index.astype(np.int32))
            values.append(_bits(access.values))
            before.append(np.zeros(count, np.int64) if access.before is None else _bits(access.before))
            at += count
        programs.append({"pid": list(program.pid), "accesses": accesses, "outside": list(program.outside)})
    buffers: list[dict[str, Any]] = []
    dense: list[Array] = []
    offset = 0
    for name, array in arrays.items():
        whole = array.size <= DENSE
        kind = "float" if np.issubdtype(array.dtype, np.floating) else "int"
        about = {"name": name, "shape": list(array.shape), "size": array.size, "dtype": str(array.dtype)}
        about |= {"kind": "pointer" if name in run.pointers else kind, "targets": list(run.pointers.get(name, ()))}
        buffers.append(about | {"written": name in run.writes, "dense": whole, "offset": offset})
        if whole:
            dense.append(_bits(array.reshape(-1)))
            offset += array.size
    content = {
        "op": run.op,
        "doc": run.doc,
        "verdict": run.verdict,
        "agrees": run.agrees,
        "missing": run.missing is not None,
        "notes": list(run.notes),
        "grid": list(run.grid) if run.grid else None,
        "launched": run.num_programs,
        "scalars": [[name, str(value)] for name, value in run.inputs.items() if name not in arrays],
        "spec": vars(run.spec),
        "kernel": vars(run.kernel),
        "launcher": vars(run.launcher),
        "buffers": buffers,
        "programs": programs,
    }
    return content, [_joined(index, np.int32), *(_joined(part, np.int64) for part in (values, before, dense))]


def _bits(array: Array) -> Array:
    if np.issubdtype(array.dtype, np.floating):
        return array.astype(np.float64).view(np.int64)
    return array.astype(np.int64)


def _joined(parts: list[Array], dtype: type) -> bytes:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype).tobytes()


# -- the static twin --------------------------------------------------------------------------------------------------
PRE = "overflow:auto;max-height:24em;padding:6px;border:1px solid #bbb;font-size:12px;line-height:1.45"


def static_twin(run: LensRun | LensError) -> str:
    """HTML without scripts that a saved notebook shows where no widget can run: sources, verdict, accesses."""
    if isinstance(run, LensError):
        return f"<p><b>Kernel lens.</b> {escape(str(run))}</p>"
    grid = f", grid {run.grid}, {run.num_programs} programs" if run.grid else ""
    parts = [f"<p><b>{escape(run.op)}</b>{grid}: {escape(run.verdict)}</p>", f"<p>{_prose(run.doc)}</p>"]
    parts += [f"<p>{escape(note)}</p>" for note in run.notes]
    columns = (_source_html("Spec", run.spec), _source_html("Kernel", run.kernel))
    parts.append(f'<div style="display:flex;flex-wrap:wrap;gap:8px">{"".join(columns)}</div>')
    parts += [_program_html(run, program) for program in run.programs[:TWIN_PROGRAMS]]
    more = len(run.programs) - TWIN_PROGRAMS
    if more > 0:
        parts.append(f"<p>… and {more} more programs. Run the cell to step through them.</p>")
    return f'<div style="font-family:sans-serif;font-size:13px">{"".join(parts)}</div>'


def _prose(text: str) -> str:
    """Escaped; double backquotes mean code."""
    parts = escape(text).split("``")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _source_html(title: str, source: SourceText) -> str:
    lines = source.text.split("\n")
    text = "\n".join(f"{source.line + i:4d}  {line}" for i, line in enumerate(lines))
    head = f"<b>{title}</b> <small>{escape(source.file)}</small>"
    return f'<div style="flex:1 1 26em;min-width:0">{head}<pre style="{PRE}">{escape(text)}</pre></div>'


def _program_html(run: LensRun, program: Program) -> str:
    about = f"{len(program.loads)} loads, {len(program.stores)} stores"
    items = [f"<li><b>Dropped:</b> {escape(text)}</li>" for text in program.outside]
    items += [f"<li>{escape(in_words(run, access))}</li>" for access in program.accesses[:TWIN_ACCESSES]]
    if len(program.accesses) > TWIN_ACCESSES:
        items.append(f"<li>… and {len(program.accesses) - TWIN_ACCESSES} more</li>")
    return f"<details><summary>Program {program.pid}: {about}</summary><ul>{''.join(items)}</ul></details>"


def in_words(run: LensRun, access: Access) -> str:
    """``L line 44: idx_mapping[0] = 2``, ``S line 47: seq_lens[0]: 0 -> 10``; at most four elements are spelled out."""
    shape = run.inputs[access.buffer].shape
    targets = run.pointers.get(access.buffer)

    def value(x: Any) -> str:
        return f"&{targets[int(x)]}" if targets else f"{x:.6g}" if isinstance(x, float) else str(x)

    said = []
    for i, flat in enumerate(access.index[:4].tolist()):
        cell = f"{access.buffer}[{', '.join(map(str, np.unravel_index(flat, shape)))}]"
        now = value(access.values[i].item())
        said.append(f"{cell} = {now}" if access.before is None else f"{cell}: {value(access.before[i].item())} → {now}")
    more = f" and {len(access.index) - 4} more" if len(access.index) > 4 else ""
    line = f" line {access.line}" if access.line else ""
    return f"{access.kind[0].upper()}{line}: {', '.join(said)}{more}"
