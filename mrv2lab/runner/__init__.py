"""The MRV2 runner: ``model_runner`` (the step), ``prepare`` (inputs by kernels), ``async_output`` (tokens to host)."""

from mrv2lab.runner.async_output import AsyncOutput
from mrv2lab.runner.model_runner import ModelRunner

__all__ = ["AsyncOutput", "ModelRunner"]
