"""Explicit CUDA graphs (tapes on a CPU): a table of shapes, a manager that captures and replays, and the reason of
every step. Counterpart in vLLM: ``v1/worker/gpu/cudagraph_utils.py``."""

from mrv2lab.graphs.descriptor import BatchDescriptor, Decision
from mrv2lab.graphs.dispatch import DispatchTable
from mrv2lab.graphs.manager import CudaGraphManager, Prepare
from mrv2lab.graphs.padding import padding_faults
from mrv2lab.graphs.report import Captured, CaptureReport
from mrv2lab.graphs.sizes import capture_sizes
from mrv2lab.graphs.stats import GraphStats

__all__ = [
    "BatchDescriptor",
    "CaptureReport",
    "Captured",
    "CudaGraphManager",
    "Decision",
    "DispatchTable",
    "GraphStats",
    "Prepare",
    "capture_sizes",
    "padding_faults",
]
