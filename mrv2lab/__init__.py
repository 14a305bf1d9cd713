"""A Jupyter-first workbench around a small, complete LLM inference runner.

Public names load their module on first use, so that ``import mrv2lab`` loads no torch::

    from mrv2lab import Engine, SamplingParams

    engine = Engine(model="tiny")
    engine.generate(["Once upon a time"], SamplingParams(max_tokens=20))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module below mrv2lab that defines it. The imports under TYPE_CHECKING say the same to type
# checkers and editors; a house test keeps the two alike.
PUBLIC: dict[str, str] = {
    "CacheConfig": "config",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "EventLog": "observer",
    "KernelLens": "widgets.kernel_lens",
    "ModelConfig": "config",
    "Observer": "observer",
    "PHASES": "observer",
    "RaceDetector": "check.races",
    "Recorder": "recorder.recorder",
    "Recording": "recording.recording",
    "RequestOutput": "engine.outputs",
    "RunReport": "engine.outputs",
    "RunnerConfig": "config",
    "Runtime": "runtime",
    "SamplingParams": "protocol",
    "SchedulerConfig": "config",
    "SchedulerOutput": "protocol",
    "StagedWriteTensor": "memory",
    "StepExplorer": "recorder.explorer",
    "StructuredOutput": "sampling_params",
    "Timeline": "widgets.timeline",
    "Trace": "trace.trace",
    "UvaBackedTensor": "memory",
    "UvaBufferPool": "runtime",
    "Workload": "engine.workload",
    "WorkloadPanel": "recorder.workload_panel",
    "burst": "engine.workload",
    "compare": "trace.compare",
    "from_csv": "engine.workload",
    "make_runtime": "runtime",
    "open_lens": "recorder.lens",
    "overlay": "recorder.overlay",
    "paused_step": "recorder.paused",
    "profile": "recorder.profile",
    "run_settings": "recorder.side_by_side",
    "steady": "engine.workload",
}

if TYPE_CHECKING:
    from mrv2lab.check.races import RaceDetector
    from mrv2lab.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
    from mrv2lab.engine.engine import Engine
    from mrv2lab.engine.outputs import RequestOutput, RunReport
    from mrv2lab.engine.workload import Workload, burst, from_csv, steady
    from mrv2lab.memory import StagedWriteTensor, UvaBackedTensor
    from mrv2lab.observer import PHASES, EventLog, Observer
    from mrv2lab.protocol import SamplingParams, SchedulerOutput
    from mrv2lab.recorder.explorer import StepExplorer
    from mrv2lab.recorder.lens import open_lens
    from mrv2lab.recorder.overlay import overlay
    from mrv2lab.recorder.paused import paused_step
    from mrv2lab.recorder.profile import profile
    from mrv2lab.recorder.recorder import Recorder
    from mrv2lab.recorder.side_by_side import run_settings
    from mrv2lab.recorder.workload_panel import WorkloadPanel
    from mrv2lab.recording.recording import Recording
    from mrv2lab.runtime import Runtime, UvaBufferPool, make_runtime
    from mrv2lab.sampling_params import StructuredOutput
    from mrv2lab.trace.compare import compare
    from mrv2lab.trace.trace import Trace
    from mrv2lab.widgets.kernel_lens import KernelLens
    from mrv2lab.widgets.timeline import Timeline

__all__ = [
    "PHASES",
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "EventLog",
    "KernelLens",
    "ModelConfig",
    "Observer",
    "RaceDetector",
    "Recorder",
    "Recording",
    "RequestOutput",
    "RunReport",
    "RunnerConfig",
    "Runtime",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerOutput",
    "StagedWriteTensor",
    "StepExplorer",
    "StructuredOutput",
    "Timeline",
    "Trace",
    "UvaBackedTensor",
    "UvaBufferPool",
    "Workload",
    "WorkloadPanel",
    "burst",
    "compare",
    "from_csv",
    "make_runtime",
    "open_lens",
    "overlay",
    "paused_step",
    "profile",
    "run_settings",
    "steady",
]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext mrv2lab``: the cell magic ``%%record``."""
    import_module(f"{__name__}.magics").register(ipython)
