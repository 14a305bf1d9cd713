"""The V1 runner: a persistent batch whose row is the batch position, kept dense and in order by moving rows."""

from mrv2lab.runner_v1.model_runner import ModelRunnerV1

__all__ = ["ModelRunnerV1"]
