"""A Recording: the steps of a run as a value, from a file or growing in memory, replayed without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.recording.layout import MAX_BYTES
from mrv2lab.recording.read import read
from mrv2lab.recording.schema import Header, StepRecord
from mrv2lab.recording.view import StepView
from mrv2lab.recording.write import DeviceTimes, RecordingWriter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd

    from mrv2lab.recording.replay import Replay


class Recording:
    """The steps of a run. A ``StepSource``: the step explorer shows it as it is.

    ``problems`` are sentences about what is missing; ``complete`` is true where there are none. ``clock`` says how
    device times were mapped to the host's clock (``uncertainty_ns``, ``drift_ppm``, ``method``); empty if nobody did.
    """

    live = False

    def __init__(
        self,
        header: Header,
        steps: list[StepRecord] | None = None,
        texts: dict[int, str] | None = None,
        *,
        title: str = "recording",
        clock: dict[str, Any] | None = None,
        problems: list[str] | None = None,
    ) -> None:
        self.header = header
        self.steps = [] if steps is None else steps
        self.texts = {} if texts is None else texts
        """Token id -> text, of the token ids that occur; empty where there was no tokenizer."""
        self.title = title
        self.clock = {} if clock is None else clock
        self.problems = [] if problems is None else problems
        self._replay: Replay | None = None

    @classmethod
    def load(cls, path: str | Path, max_bytes: int = MAX_BYTES) -> Recording:
        """The recording in a file, titled by its name; see ``read.read`` for errors and for ``max_bytes``.

        A file that was cut off, or is still being written, gives the steps that it has and says so in ``problems``.
        """
        found = read(path, max_bytes)
        return cls(
            found.header, found.steps, found.texts, title=Path(path).name, clock=found.clock, problems=found.problems
        )

    def save(self, path: str | Path) -> None:
        """Write everything to ``path``; loading it gives an equal recording.

        An existing file, be it the one that this was loaded from, is replaced once the new one is whole, not before.
        """
        spans = [span for step in self.steps for span in step.spans]
        marks = [mark for step in self.steps for mark in step.marks]
        times = DeviceTimes(
            np.array([span.device_end_ns for span in spans], np.int64),
            np.array([mark.device_start_ns for mark in marks], np.int64),
            np.array([mark.device_end_ns for mark in marks], np.int64),
            **self.clock,
        )
        path = Path(path)
        part = path.with_name(f"{path.name}.part")
        try:
            with RecordingWriter(part, self.header) as writer:
                writer.append(self.steps, self.texts)
                writer.close(times, self.problems)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.problems

    def append(self, step: StepRecord, texts: Mapping[int, str] | None = None) -> None:
        """Grow by one step, with the texts of token ids that are new."""
        self.steps.append(step)
        self.texts.update(texts or {})

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> StepRecord:
        return self.steps[index]

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.steps)

    def __repr__(self) -> str:
        header = self.header
        steps = f"{len(self)} step" + "s" * (len(self) != 1)
        times = ", modelled times" if header.modelled else ""
        problems = "".join(f"; {problem}" for problem in self.problems)
        return f"Recording of {steps}, {header.runner} on {header.device}, mode {header.mode}{times}{problems}"

    # -- a StepSource ------------------------------------------------------------------------------------------------
    def view(self, index: int) -> StepView:
        """The step at ``index`` for the step explorer. Raises ``IndexError`` outside 0..len-1."""
        from mrv2lab.recording.view import step_view

        if not 0 <= index < len(self):
            raise IndexError(f"step {index} is outside 0..{len(self) - 1} of {self.title}")
        return step_view(self._replayed(), index)

    def advance(self, unit: str) -> str | None:
        """Raises ``RuntimeError``: only a live source can."""
        raise RuntimeError(f"{self.title} is a recording: there is no engine behind it that could run another {unit}")

    def close(self) -> None:
        """Drop what was cached to show steps; they can be shown again."""
        self._replay = None

    def verify(self) -> list[str]:
        """Compare the rebuilt state with every checksum that the device sent; a sentence for each that differs."""
        from mrv2lab.recording.replay import Replay

        return Replay(self).verify()

    def _replayed(self) -> Replay:
        from mrv2lab.recording.replay import Replay

        if self._replay is None:
            self._replay = Replay(self)
        return self._replay

    # -- frames ------------------------------------------------------------------------------------------------------
    def spans_frame(self) -> pd.DataFrame:
        """A row a span: ``index`` among the recording's steps, the scheduler's ``step``, and the span's fields.

        Times in int64 nanoseconds of the recording's clock; unknown device times are ``<NA>``.
        """
        names = "name depth start_ns end_ns device_end_ns added".split()
        return _frame(names, [(i, step.step, span) for i, step in enumerate(self.steps) for span in step.spans])

    def marks_frame(self) -> pd.DataFrame:
        """A row a mark, as :meth:`spans_frame`; ``reads`` and ``writes`` are tuples of buffer names."""
        names = "kind name phase stream nbytes wait_ns time_ns device_start_ns device_end_ns reads writes site added"
        return _frame(names.split(), [(i, step.step, mark) for i, step in enumerate(self.steps) for mark in step.marks])


def _frame(names: list[str], records: list[tuple[int, int, Any]]) -> pd.DataFrame:
    import pandas as pd

    columns: dict[str, Any] = {
        "index": np.array([index for index, _, _ in records], np.int64),
        "step": np.array([step for _, step, _ in records], np.int64),
    }
    for name in names:
        values = [getattr(record, name) for _, _, record in records]
        if name.startswith("device_"):
            times = np.array(values, np.int64)
            columns[name] = pd.arrays.IntegerArray(times, times == -1)
        elif name.endswith("_ns") or name in ("nbytes", "depth"):
            columns[name] = np.array(values, np.int64)
        elif name == "added":
            columns[name] = np.array(values, bool)
        else:
            columns[name] = pd.Series(values, dtype=object if name in ("reads", "writes") else "str")
    return pd.DataFrame(columns)
