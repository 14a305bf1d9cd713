"""A small per-request table whose truth the host owns and kernels read. Counterpart in vLLM: ``UvaBackedTensor``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mrv2lab.runtime.base import Shape
from mrv2lab.runtime.transfer import TransferPolicy


class UvaBackedTensor:
    """``np`` is the host's; kernels read ``gpu``, the snapshot of the last :meth:`publish`.

    How the snapshot reaches the device is the transfer policy's affair (under ``uva_pool`` it is a UVA slot, hence the
    name). ``gpu`` may be another tensor after each publish: take it anew at every launch, and never in a graph.
    """

    def __init__(self, transfers: TransferPolicy, name: str, shape: Shape, dtype: torch.dtype) -> None:
        self._table = transfers.table(name, shape, dtype)
        self.np: np.ndarray[Any, Any] = self._table.np

    @property
    def gpu(self) -> torch.Tensor:
        """What kernels queued from now on should be given."""
        return self._table.gpu

    def publish(self) -> None:
        """Make the present ``np`` visible to kernels queued from now on. At most once a step."""
        self._table.publish()
