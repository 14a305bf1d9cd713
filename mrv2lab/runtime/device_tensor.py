"""What the host may do with device storage on a CPU-only machine: the same as on CUDA, and no more.

Views and slices are free. A read (``.item()``, ``.tolist()``, ``.numpy()``, ``bool``, ``nonzero``, a mask index, a copy
into a host tensor, ...) is an *implicit sync*: it is recorded, the stream drained, and then the read done. Any other
torch operation outside ``rt.kernel`` and ``rt.run`` raises and names the caller. A Tensor subclass sees these calls in
every thread and every notebook cell, without a mode that somebody must enter. Raw addresses (``data_ptr``, a storage,
``to_dlpack``) are the caller's own affair, as on CUDA.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mrv2lab.runtime.base import PlaceError, call_site
from mrv2lab.runtime.places import Place

_FACTS = frozenset(
    "__get__ size stride dim numel data_ptr is_contiguous storage untyped_storage element_size __len__ is_pinned "
    "storage_offset ndimension nelement is_floating_point is_complex get_device __hash__ is_inference is_shared "
    "__dlpack_device__ is_signed dense_dim sparse_dim is_set_to is_same_size".split()
)
_VIEWS = frozenset(
    "view reshape flatten unflatten unsqueeze squeeze t transpose permute narrow select expand expand_as unbind "
    "view_as detach alias split chunk tensor_split unfold diagonal movedim moveaxis swapaxes swapdims as_strided "
    "contiguous".split()
)
_READS = frozenset(
    "item tolist numpy __array__ __bool__ __int__ __float__ __index__ __complex__ nonzero argwhere equal allclose "
    "is_nonzero __contains__ __repr__ __format__ cpu __reduce_ex__ unique masked_select".split()
)
_SNAPSHOTS = frozenset({"cpu", "to", "__reduce_ex__"})
"""Reads whose result would share the device's bytes here; they get a copy, which is what CUDA gives."""
_TO_HOST = frozenset({"copy_", "__setitem__"})
"""Writes that are reads where the device tensor is the source: ``host.copy_(device)``, ``host[...] = device``."""

Kwargs = dict[str, Any]


class DeviceTensor(torch.Tensor):
    """A view of device storage of a CPU-only runtime. Made by ``Runtime.empty`` and ``Runtime.adopt``."""

    plain: torch.Tensor
    """The same bytes without any check: for queued work."""
    owner: weakref.ref[Any]
    """The runtime whose queue must be drained before a read."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> Any:
        name = func.__name__
        kwargs = kwargs or {}
        device = args[0] if args and type(args[0]) is cls else _find((args, kwargs))
        if name in _FACTS or name in _VIEWS or (name == "__getitem__" and device is args[0] and _is_view(args[1])):
            return _views(func(*plain(args), **plain(kwargs)), device, name)
        if name in _READS or _is_read(name, device, args, kwargs):
            return _read(name, device, func, args, kwargs)
        raise _refusal(name)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> Any:
        """What gets past ``__torch_function__``: factories (``torch.tensor(t)``) and scalars read in C++."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return _read("item", args[0], torch.Tensor.item, args, {})
        raise _refusal(func.__name__)


def own(tensor: torch.Tensor, owner: weakref.ref[Any]) -> DeviceTensor:
    """``tensor`` as device storage of the runtime ``owner``."""
    made = tensor.as_subclass(DeviceTensor)
    made.plain = tensor
    made.owner = owner
    return made


def plain(arg: Any) -> Any:
    """``arg`` with plain torch tensors for device tensors (in tuples, lists and dicts too). For queued work."""
    kind = type(arg)
    if kind is DeviceTensor:
        return arg.plain
    if kind is tuple or kind is list:
        return kind(plain(one) for one in arg)
    if kind is dict:
        return {key: plain(value) for key, value in arg.items()}
    return arg


def _find(arg: Any) -> Any:
    """The first device tensor in ``arg``."""
    if type(arg) is DeviceTensor:
        return arg
    if isinstance(arg, (tuple, list, dict)):
        parts = arg.values() if isinstance(arg, dict) else arg
        return next((found for one in parts if (found := _find(one)) is not None), None)
    return None


def _refusal(name: str) -> PlaceError:
    return PlaceError(
        f"torch.{name} on device storage outside rt.kernel and rt.run, at {call_site()}: queued work would not have "
        "run yet. Register it with rt.register and launch it with rt.run, copy with rt.h2d or rt.d2h, or look at a "
        "host copy with rt.read(tensor)"
    )


def _views(made: Any, device: DeviceTensor, name: str) -> Any:
    """Tensors of ``made`` as device tensors. Raises where a "view" had to copy: that is work, and was not queued."""
    if isinstance(made, torch.Tensor):
        if made.untyped_storage().data_ptr() != device.plain.untyped_storage().data_ptr():
            raise _refusal(f"{name} (which copies here)")
        return own(made, device.owner)
    return type(made)(_views(one, device, name) for one in made) if _holds_tensors(made) else made


def _holds_tensors(made: Any) -> bool:
    return isinstance(made, (tuple, list)) and len(made) > 0 and isinstance(made[0], torch.Tensor)


def _is_view(index: Any) -> bool:
    """Whether indexing with ``index`` makes a view without looking at any device storage."""
    if isinstance(index, tuple):
        return all(_is_view(one) for one in index)
    if index is None or index is Ellipsis or isinstance(index, (slice, np.integer)):
        return True
    if isinstance(index, torch.Tensor):
        return type(index) is not DeviceTensor and index.dim() == 0 and index.dtype is not torch.bool
    return isinstance(index, int) and not isinstance(index, bool)


def _is_read(name: str, device: DeviceTensor, args: tuple[Any, ...], kwargs: Kwargs) -> bool:
    """Whether ``name`` with these arguments waits on CUDA."""
    if name == "__getitem__":  # a mask or a host list waits; a tensor of indices is one more launch
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        launches = (type(i) is DeviceTensor and i.dim() > 0 and i.dtype not in (torch.bool, torch.uint8) for i in parts)
        return device is args[0] and not all(_is_view(i) or launch for i, launch in zip(parts, launches, strict=True))
    if name == "__setitem__":
        return type(args[0]) is not DeviceTensor and type(args[2]) is DeviceTensor and _is_view(args[1])
    if name == "copy_":
        return type(args[0]) is not DeviceTensor and not kwargs.get("non_blocking", len(args) > 2 and args[2])
    if name != "to" or kwargs.get("non_blocking", False):
        return False
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    if isinstance(target, torch.Tensor):
        return type(target) is not DeviceTensor
    return isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu"


def _read(name: str, device: DeviceTensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Drain, then do it. A runtime that is gone has nothing queued."""
    runtime = device.owner()
    if runtime is not None:
        runtime.implicit_sync(name, device)
    if name in _SNAPSHOTS:
        args = (device.plain.clone(), *args[1:])
    made = func(*plain(args), **plain(kwargs))
    if isinstance(made, np.ndarray):
        return made.copy()  # NumPy views exist for host places only
    if name in _SNAPSHOTS or name in _TO_HOST:
        return made
    if isinstance(made, torch.Tensor):
        return _result(made, device, name)
    return type(made)(_result(one, device, name) for one in made) if _holds_tensors(made) else made


def _result(made: torch.Tensor, device: DeviceTensor, name: str) -> DeviceTensor:
    """A result that CUDA leaves on the device (``nonzero``, a mask index)."""
    runtime = device.owner()
    if runtime is not None and runtime.registry.find(made) is None:
        runtime.registry.add(made, f"result of {name}", Place.DEVICE)
    return own(made, device.owner)
