"""vLLM's own sampling kernels as entrants, from an installed vLLM or from a folder that holds a few of its files.

The files need not be importable as a whole (vLLM brings compiled libraries and fifty packages). Its kernels need Triton
and a handful of names; :func:`kernel_files` gives them those and answers everything else they import with a stand-in:

    pip download --no-deps --only-binary=:all: -d whl vllm==0.26.0
    unzip whl/vllm-*.whl 'vllm/v1/worker/gpu/sample/*' 'vllm/v1/sample/ops/*' -d DIR
    mrv2lab bench sampler --vllm-kernels DIR

Signatures are vLLM 0.26's. Nothing of vLLM is imported when this module is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mrv2lab.bench.sampler_batch import LOGPROBS, Entrant, SamplerBatch
from mrv2lab.bench.sampler_peers import Absent
from mrv2lab.ops._op import cdiv, next_power_of_2

GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"
MIN_P_FILE = "vllm.v1.worker.gpu.sample.min_p"
LOGPROB = "vllm.v1.worker.gpu.sample.logprob"
PENALTIES_FILE = "vllm.v1.worker.gpu.sample.penalties"
TOP_K_TOP_P = "vllm.v1.sample.ops.topk_topp_triton"
KERNELS = (GUMBEL, MIN_P_FILE, LOGPROB, PENALTIES_FILE, TOP_K_TOP_P)


class _Anything(ModuleType):
    """Answers every name with a class that takes anything and keeps what it is given by name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def keep(self: Any, *args: Any, **given: Any) -> None:
            self.__dict__.update(given, args=args)

        return type(name, (), {"__init__": keep})


def _given_names() -> dict[str, dict[str, Any]]:
    triton: Any = importlib.import_module("triton")
    language: Any = importlib.import_module("triton.language")
    return {
        "vllm.triton_utils": {
            "HAS_TRITON": True,
            "triton": triton,
            "tl": language,
            "tldevice": importlib.import_module("triton.language.extra.libdevice"),
        },
        "vllm.utils.math_utils": {
            "cdiv": cdiv,
            "next_power_of_2": next_power_of_2,
        },
        "vllm.utils.platform_utils": {
            "num_compute_units": lambda device=0: torch.cuda.get_device_properties(device).multi_processor_count
        },
    }


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of ``vllm``: the kernel files from ``folder``, the names above, else a stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.given = _given_names()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> Any:
        if name.partition(".")[0] != "vllm":
            return None
        if name in KERNELS:
            return importlib.util.spec_from_file_location(name, self.folder / (name.replace(".", "/") + ".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        made = _Anything(spec.name)
        made.__dict__.update(self.given.get(spec.name, {}))
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


@contextmanager
def kernel_files(folder: str | Path) -> Iterator[dict[str, ModuleType]]:
    """The kernel modules under ``folder``, the one that holds ``vllm/``, by name. A ``vllm`` that is loaded already is
    put aside inside the ``with`` and back behind it. Raises :class:`Absent` naming what is missing or does not load."""
    folder = Path(folder).resolve()
    missing = [name for name in KERNELS if not (folder / (name.replace(".", "/") + ".py")).is_file()]
    if missing:
        raise Absent(f"{folder.name}/ lacks {missing[0].replace('.', '/')}.py")
    aside = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}
    try:
        finder = _Finder(folder)
    except ImportError as error:
        sys.modules.update(aside)
        raise Absent(f"vLLM's kernels need Triton: {error}") from error
    sys.meta_path.insert(0, finder)
    try:
        try:
            made = {name: importlib.import_module(name) for name in KERNELS}
        except Exception as error:
            raise Absent(f"vLLM's kernel files do not load: {type(error).__name__}: {error}") from error
        yield made
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(aside)


@contextmanager
def installed_kernels() -> Iterator[dict[str, ModuleType]]:
    """The same of an installed vLLM. Raises :class:`Absent`."""
    if importlib.util.find_spec("vllm") is None:
        raise Absent("vllm is not installed; --vllm-kernels DIR takes its kernel files (mrv2lab/bench/vllm_kernels.py)")
    try:
        importlib.import_module("vllm.platforms").current_platform.import_kernels()
        made = {name: importlib.import_module(name) for name in KERNELS}
    except Exception as error:  # an installation that does not fit the machine fails in many ways
        raise Absent(f"vllm is installed but does not import: {type(error).__name__}: {error}") from error
    yield made


def vllm_ways(b: SamplerBatch, kernels: dict[str, ModuleType]) -> list[Entrant]:
    """Of the kernels as loaded. Raises :class:`Absent` without a GPU."""
    if b.device.type != "cuda":
        raise Absent("vLLM's kernels run on an NVIDIA GPU only")
    gumbel, min_p, logprob, penalties, cut = (_as_any(kernels[name]) for name in KERNELS)
    greedy = torch.zeros_like(b.temperature)

    def cached() -> int:
        """The float32 rows that the cut's programs keep, by device, type of the logits and vocabulary."""
        held = getattr(cut, "_TRITON_BUFFER_CACHE", {}).get((b.logits.device, b.dtype, b.vocab))
        return 0 if held is None else int(held.nbytes)

    draw = (b.seeds, b.positions)
    rows = [
        Entrant("gumbel", "vllm gumbel_sample",
                lambda: gumbel.gumbel_sample(b.logits, b.idx_mapping, b.temperature, *draw, apply_temperature=True)),
        Entrant("greedy", "vllm gumbel_sample, temperature 0",
                lambda: gumbel.gumbel_sample(b.logits, b.idx_mapping, greedy, *draw, apply_temperature=True)),
        Entrant("topk_topp", "vllm apply_top_k_top_p_triton",
                lambda: cut.apply_top_k_top_p_triton(b.work, b.top_k, b.top_p), b.restore, cached),
        Entrant("top_p", "vllm apply_top_k_top_p_triton",
                lambda: cut.apply_top_k_top_p_triton(b.work, None, b.top_p), b.restore, cached),
        Entrant("min_p", "vllm apply_min_p",
                lambda: min_p.apply_min_p(b.work, b.idx_mapping, b.min_p), b.restore),
        Entrant("logprobs", "vllm compute_topk_scores",
                lambda: logprob.compute_topk_scores(b.logits, min(LOGPROBS, b.vocab), b.chosen)),
    ]  # fmt: skip
    punish = (b.idx_mapping, b.input_ids, b.zeros, *b.penalties, b.prompt_bin_mask, b.output_bin_counts)
    rows.append(
        Entrant("penalties", "vllm apply_penalties", lambda: penalties.apply_penalties(b.work, *punish), b.restore)
    )
    return rows


def _as_any(module: Any) -> Any:
    return module
