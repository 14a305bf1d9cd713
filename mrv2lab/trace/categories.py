"""What the categories of torch's profiler, of today and of 2021, say about an event."""

from __future__ import annotations

from mrv2lab.trace.trace import KIND

_KINDS = {
    "op": "cpu_op Operator operator cpu_op_annotation",
    "annotation": "user_annotation UserAnnotation user_annotation_cpu",
    "python": "python_function PythonFunction FEE",  # FEE: VizTracer's function entries and exits
    "runtime": (
        "cuda_runtime cuda_driver Runtime Driver hip_runtime hip_driver glow_runtime xpu_runtime xpu_driver "
        "mtia_runtime mtia_driver privateuse1_runtime privateuse1_driver"
    ),
    "kernel": "kernel Kernel concurrent_kernel xpu_kernel mtia_kernel mtia_ccp_events privateuse1_kernel",
    "memcpy": "gpu_memcpy Memcpy memcpy xpu_memcpy mtia_memcpy privateuse1_memcpy",
    "memset": "gpu_memset Memset memset xpu_memset mtia_memset privateuse1_memset",
    "graph": "cuda_graph",
    "phase": "phase",  # ours, as written by write_perfetto
    "gpu_annotation": "gpu_user_annotation GpuUserAnnotation xpu_user_annotation mtia_user_annotation "
    "privateuse1_user_annotation",
    "sync": "cuda_sync hip_sync xpu_sync mtia_sync privateuse1_sync",
    "event": "cuda_event hip_event xpu_event privateuse1_event",
    "overhead": "overhead Overhead",
    "collective": "collective_comm",
    "instant": "cpu_instant_event",
    "counter": "hardware_counters gpu_pm_counter",
}
CATEGORY_KIND: dict[str, int] = {text: KIND[kind] for kind, texts in _KINDS.items() for text in texts.split()}
"""Category -> position in KINDS; what is not here is "other"."""
KINETO_CATEGORIES: frozenset[str] = frozenset(CATEGORY_KIND) - {"FEE", "phase"}
DEVICE_ROLE: dict[int, str] = {
    KIND["kernel"]: "stream",
    KIND["memcpy"]: "stream",
    KIND["memset"]: "stream",
    KIND["graph"]: "stream",
    KIND["gpu_annotation"]: "annotation",
    KIND["sync"]: "other",
    KIND["event"]: "other",
}
"""Kinds that live on a device, with the role of their lanes: only work shares a stream's row."""
DEVICE_CATEGORIES: frozenset[str] = frozenset(text for text, kind in CATEGORY_KIND.items() if kind in DEVICE_ROLE)
PHASE_PREFIX = "mrv2lab.phase."
"""Our own phases, as ``record_function`` names them."""
