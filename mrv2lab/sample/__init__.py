"""Sampling: row-indexed parameters (``sampling_state``) and the stages that read them (``sampler``)."""

from mrv2lab.sample.sampler import Sampler
from mrv2lab.sample.sampling_state import SamplingState

__all__ = ["Sampler", "SamplingState"]
