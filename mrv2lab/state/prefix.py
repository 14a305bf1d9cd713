"""The first elements of a fixed buffer, as views that are kept: steps ask for the same few lengths over and over."""

from __future__ import annotations

import torch

MAX_KEPT = 256
"""Views that a prefix keeps; then it begins anew."""


class Prefix:
    """``prefix(n)`` is ``tensor[:n]``. A view costs the host 1 to 2 us, and a decode step takes ten of them; besides,
    launches of the same tensors as before are cheap (``ops/_repeat``), and a batch that grows and shrinks comes back to
    its lengths."""

    __slots__ = ("_views", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._views = {len(tensor): tensor}

    def __call__(self, n: int) -> torch.Tensor:
        view = self._views.get(n)
        if view is None:
            if len(self._views) >= MAX_KEPT:
                self._views.clear()
            view = self._views[n] = self.tensor[:n]
        return view
