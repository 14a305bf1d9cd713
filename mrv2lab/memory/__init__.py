"""State tables that the host changes and the device reads: ``uva_backed`` (whole), ``staged_write`` (as diffs)."""

from mrv2lab.memory.diffs import StagedDiff, Values
from mrv2lab.memory.staged_write import FusedStagedWriter, StagedWriteTensor
from mrv2lab.memory.uva_backed import UvaBackedTensor

__all__ = ["FusedStagedWriter", "StagedDiff", "StagedWriteTensor", "UvaBackedTensor", "Values"]
