"""``with profile(engine) as p: engine.run(workload)`` and then ``p.trace``: where the time of both sides went.

On a GPU the trace is ``torch.profiler``'s, with our steps and phases as annotations (``annotate.py``).
On a software stream the profiler would see host work only, so the trace is made of the chokepoints' marks, on the
runtime's own clock, and its device times are modelled.

What it costs, beside the profiler itself: an annotation takes the host about 6 us, some sixteen of them a turn, most of
it between the phases. A recording beside it looks at the engine's host objects between phases and adds some list
appends a launch; it is taken without checksums and, on a GPU, with one timing event a turn, so that the device does the
engine's work and next to nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import torch

from mrv2lab import __version__
from mrv2lab.engine.engine import Engine
from mrv2lab.observer import NULL_OBSERVER, Observer
from mrv2lab.protocol import SchedulerOutput
from mrv2lab.recorder.annotate import Annotator
from mrv2lab.recorder.batch import batch_of
from mrv2lab.recorder.host_log import HostLog, LoggedMark
from mrv2lab.recorder.listen import Listener
from mrv2lab.recorder.log_trace import log_trace
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recorder.step_hook import StepHook, hooks
from mrv2lab.recorder.together import Together
from mrv2lab.recording.recording import Recording
from mrv2lab.trace.annotations import Batch
from mrv2lab.trace.read import load
from mrv2lab.trace.step_batches import FACTS, PARTS
from mrv2lab.trace.trace import Trace
from mrv2lab.trace.write import write_perfetto

CUT_SHORT = "device work is missing at the end: queued work had raised when the profile ended"
REPLACED = "turns are missing: another observer took this profile's place inside the `with`"


def profile(
    engine: Engine,
    *,
    warmup: int = 3,
    path: str | Path | None = None,
    with_stack: bool = False,
    record: bool = True,
    activities: Iterable[torch.profiler.ProfilerActivity] | None = None,
    title: str | None = None,
) -> Profile:
    """A profile of what ``engine`` does inside the ``with``, its first ``warmup`` turns left out.

    ``path``: keep the trace there as Chrome JSON, gzipped if it ends in ``.gz``. ``with_stack``: Python frames as well
    (torch.profiler only; slow). ``record``: also a Recording of the same steps, MRV2 only; with V1 there is none.
    ``activities``: run torch.profiler with these; None: CPU and CUDA on a GPU, and no torch.profiler on a CPU, where
    its host events would go to ``torch_trace``.

    Two moments synchronise: the end of the warm-up and the end of the ``with``. Raises ``ValueError`` for arguments out
    of range; entering raises ``RuntimeError`` when the engine was closed, stands in a paused step, or is being profiled
    or recorded already.
    """
    return Profile(engine, warmup, path, with_stack, record, activities, title)


class Profile:
    """See :func:`profile`, which makes it. Enters once; the engine is left as it was, also after an exception."""

    def __init__(
        self,
        engine: Engine,
        warmup: int,
        path: str | Path | None,
        with_stack: bool,
        record: bool,
        activities: Iterable[torch.profiler.ProfilerActivity] | None,
        title: str | None,
    ) -> None:
        if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
            raise ValueError(f"warmup counts turns of the engine and must be an integer >= 0, got {warmup!r}")
        if path is not None and not str(path).endswith((".json", ".json.gz")):
            raise ValueError(f"path is written as Chrome JSON and must end in .json or .json.gz, got {str(path)!r}")
        self.engine = engine
        self.warmup = warmup
        self.path = Path(path) if path is not None else None
        settings = engine.config.runner
        self.title = title if title is not None else f"{settings.runner} {settings.transfer}"
        self.problems: list[str] = []
        """Sentences about what this profile lacks; empty where nothing does."""
        self.torch_trace: Trace | None = None
        """What torch.profiler saw, where it ran; on a GPU that is :attr:`trace` too."""
        self._on_gpu = engine.rt.device.type == "cuda"
        kinds = torch.profiler.ProfilerActivity
        if activities is None:
            activities = (kinds.CPU, kinds.CUDA) if self._on_gpu else ()
        self._activities = tuple(activities)
        self._with_stack = with_stack
        self._record = record and settings.runner == "mrv2"
        self._recorder: Recorder | None = None
        self._hook: StepHook | None = None
        self._stack = ExitStack()
        self._skipped = 0
        self._log: HostLog | None = None
        self._annotator: Annotator | None = None
        self._observer = Together()
        self._torch: torch.profiler.profile | None = None
        self._schedule: SchedulerOutput | None = None
        self._trace: Trace | None = None
        self._ended = False

    # -- begin ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Profile:
        engine = self.engine
        if self._hook is not None:
            raise RuntimeError("a profile is taken once; make a new one: with profile(engine) as p: ...")
        if any(isinstance(hook, _ProfileHook) for hook in hooks(engine)):
            raise RuntimeError("this engine is being profiled already; leave that `with` first")
        if isinstance(engine.observer, Listener):
            raise RuntimeError(
                "this engine is being recorded; leave that Recorder, or close the explorer on the engine, first: "
                "profile(engine, record=True) makes a recording of its own"
            )
        hook = _ProfileHook(engine, self._before, self._after)
        hook.attach()
        self._hook = hook
        if self._on_gpu and torch.profiler.ProfilerActivity.CUDA in self._activities:
            try:
                _prime(engine.rt.device.index or 0)
            except BaseException:
                hook.detach()
                raise
        return self

    def _before(self, step: int) -> None:
        if self._log is None:
            if self._skipped < self.warmup:
                self._skipped += 1
                return
            self._begin()
        assert self._log is not None
        self._schedule = self.engine.core.last_schedule
        if self._annotator is not None:
            self._annotator.begin_turn(step)
        self._log.begin_turn(step)

    def _after(self, step: int) -> None:
        if self._log is None:
            return
        if self._annotator is not None:
            self._annotator.end_turn()
        schedule = self.engine.core.last_schedule
        self._log.end_turn(schedule if schedule is not self._schedule else None)
        if not self._log.heard_last_turn and REPLACED not in self.problems:
            self.problems.append(REPLACED)

    def _begin(self) -> None:
        """The warm-up is over: from an idle device on, everybody listens."""
        engine, rt = self.engine, self.engine.rt
        with ExitStack() as stack:
            self._synchronize()
            before = engine.observer
            listening: list[Observer] = []
            if self._record:
                times: Any = "none" if self._on_gpu else "launches"
                self._recorder = stack.enter_context(Recorder(engine, check_every=0, device_times=times))
                listening.append(engine.observer)
            log = HostLog(rt, None if self._on_gpu else rt.stamps())
            if self._activities:
                self._annotator = Annotator(engine, (torch.profiler.record_function,), log)
            # Ours inside, so that its phases hold nothing of what others do at their ends.
            self._observer = Together(*listening, before, self._annotator or log)
            stack.callback(self._let_go, before)
            engine.observer = self._observer
            if self._activities:
                self._torch = _profiler(self._activities, self._with_stack)
                self._torch.start()
                stack.callback(self._torch.stop)
            self._log = log
            self._stack = stack.pop_all()

    def _synchronize(self) -> None:
        """Wait for the device without a word to whoever listens."""
        engine = self.engine
        before, engine.observer = engine.observer, NULL_OBSERVER
        try:
            engine.rt.synchronize()
        finally:
            engine.observer = before

    def _let_go(self, before: Observer) -> None:
        while isinstance(before, Annotator) and before.over:  # its `with` lay inside ours and has ended
            before = before.inner
        self._observer.keep(before)  # whoever has put an observer around ours goes on telling it
        if self.engine.observer is self._observer:
            self.engine.observer = before

    # -- end -----------------------------------------------------------------------------------------------------------

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._hook is not None
        if self._hook not in hooks(self.engine):
            self.problems.append(REPLACED)
        self._hook.detach()
        self._ended = True
        log = self._log
        if log is None:
            return
        try:
            with self._stack:
                try:
                    self._synchronize()
                except RuntimeError:  # queued work had raised; whoever waits for it next is told
                    self.problems.append(CUT_SHORT)
                if self._torch is not None:
                    self._torch.add_metadata_json(FACTS, orjson.dumps(self._facts()).decode())
            self._build(log)
        except Exception as error:
            if kind is None:
                raise
            self.problems.append(f"there is no trace: {type(error).__name__}: {error}")  # the body's own error goes on

    def _facts(self) -> dict[str, Any]:
        """What the profiler's file cannot know of the engine, for whoever reads it."""
        assert self._log is not None
        config = dataclasses.asdict(self.engine.config)
        turns = self._log.turns
        nothing = Batch(0, 0, 0, 0)
        batches = [batch_of(turn.schedule) if turn.schedule is not None else nothing for turn in turns]
        return {
            "version": __version__,
            "config": config,
            "warmup": self.warmup,
            "recorded": self._recorder is not None,
            "problems": self.problems,
            "steps": [turn.step for turn in turns],
            "requests": [batch.context_requests + batch.generation_requests for batch in batches],
            "tokens": [batch.context_tokens + batch.generation_tokens for batch in batches],
            **{part: [getattr(batch, part) for batch in batches] for part in PARTS},
        }

    def _build(self, log: HostLog) -> None:
        if self._torch is not None:
            self.torch_trace = self._exported(self._torch)
        if self._on_gpu and self.torch_trace is not None:
            self._trace = self.torch_trace
            return
        self._trace = log_trace(log, self.engine, self.title)
        if self.path is not None:
            write_perfetto(self._trace, self.path)

    def _exported(self, profiler: torch.profiler.profile) -> Trace:
        """The profiler's events by way of its file, in ``path`` or for a moment."""
        with tempfile.TemporaryDirectory() as folder:
            keep = self.path if self._on_gpu else None
            file = keep if keep is not None else Path(folder, "trace.json")
            profiler.export_chrome_trace(str(file))
            trace = load(file, cache=False, progress=False)
        info = dataclasses.replace(trace.info, title=self.title, path=str(keep) if keep is not None else "")
        return dataclasses.replace(trace, info=info)

    # -- results -------------------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """Everything that was seen. Raises ``RuntimeError`` inside the ``with`` and where no turn was left to see."""
        if self._trace is None:
            self._refuse("trace")
            raise RuntimeError("there is no trace; " + "; ".join(self.problems))
        return self._trace

    @property
    def recording(self) -> Recording | None:
        """The same steps as a recording; None for V1 and with ``record=False``. Raises as :attr:`trace` does."""
        self._refuse("recording")
        return self._recorder.recording if self._recorder is not None else None

    @property
    def log(self) -> HostLog:
        """Turns, spans and marks, as the chokepoints told them. Raises as :attr:`trace` does."""
        self._refuse("log")
        assert self._log is not None
        return self._log

    @property
    def marks(self) -> list[LoggedMark]:
        """Every chokepoint that was passed, in order. Raises as :attr:`trace` does."""
        return self.log.marks

    @property
    def waits(self) -> list[LoggedMark]:
        """The chokepoints at which the host stood still or could have: kind, name, wait_ns, phase, step, site."""
        return self.log.waits

    def _refuse(self, what: str) -> None:
        if not self._ended:
            raise RuntimeError(f"the {what} is there behind the `with`: with profile(engine) as p: engine.step()")
        if self._log is None:
            raise RuntimeError(
                f"this profile is empty: the first {self.warmup} turns are warm-up, and the engine made "
                f"{self._skipped}; step more, or give a smaller warmup"
            )

    def __repr__(self) -> str:
        if self._log is None or not self._ended:
            return f"Profile {self.title!r}, {'empty' if self._ended else 'not over'}"
        recorded = ", recorded" if self._recorder is not None else ""
        return f"Profile {self.title!r}: {len(self._log.turns)} turns{recorded}, {len(self.waits)} waits"


class _ProfileHook(StepHook):
    """By which a profile knows another one."""


def _profiler(activities: tuple[Any, ...], with_stack: bool) -> torch.profiler.profile:
    """With CUPTI's own records of synchronisations, from which the time that was really waited follows."""
    config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    return torch.profiler.profile(
        activities=activities, with_stack=with_stack, acc_events=True, experimental_config=config
    )


@functools.cache
def _prime(device: int) -> None:
    """CUPTI's first use takes seconds: once a process, before the warm-up."""
    kinds = torch.profiler.ProfilerActivity
    with _profiler((kinds.CPU, kinds.CUDA), False):
        torch.ones(1, device=torch.device("cuda", device)).add_(1)
        torch.cuda.synchronize(device)
