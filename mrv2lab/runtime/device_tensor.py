"""What the host may do with device storage on a CPU-only machine: the same as on CUDA, and no more.

Views and slices are free. A read (``.item()``, ``.tolist()``, ``.numpy()``, ``bool``, ``nonzero``, a mask index, ...)
is an *implicit sync*: it is recorded, the stream drained, and then the read done. Any other torch operation outside
``rt.kernel`` and ``rt.run`` raises and names the caller. A Tensor subclass sees these calls in every thread and every
notebook cell, without a mode that somebody must enter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from mrv2lab.runtime.base import PlaceError, call_site

_VIEWS = frozenset(
    "view reshape flatten unsqueeze squeeze t transpose permute narrow select expand unbind view_as detach alias "
    "split chunk unfold diagonal movedim swapaxes".split()
)
_FACTS = frozenset(
    "__get__ size stride dim numel data_ptr is_contiguous storage untyped_storage element_size __len__ is_pinned "
    "storage_offset ndimension nelement is_floating_point is_complex get_device __hash__ is_inference is_shared "
    "__dlpack_device__ is_signed dense_dim sparse_dim".split()
)
_READS = frozenset(
    "item tolist numpy __array__ __bool__ __int__ __float__ __index__ __complex__ nonzero argwhere equal allclose "
    "is_nonzero __contains__ __repr__ __format__ cpu __dlpack__ __reduce_ex__ __deepcopy__ unique masked_select".split()
)


class DeviceTensor(torch.Tensor):
    """A view of device storage of a CPU-only runtime. Made by ``Runtime.empty`` and ``Runtime.adopt``."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        kwargs = kwargs or {}
        if name in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "as_subclass":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _VIEWS or (name == "__getitem__" and _is_slice(args[1])):
            with torch._C.DisableTorchFunctionSubclass():
                made = func(*args, **kwargs)
            return _wrap(made)
        if name in _READS or name == "__getitem__" or (name == "to" and _to_host(args, kwargs)):
            owner = _owner(next(arg for arg in args if isinstance(arg, DeviceTensor)))
            if owner is not None:
                return owner.implicit_read(name, func, args, kwargs)
            with torch._C.DisableTorchFunctionSubclass():  # its runtime is gone, so nothing is queued
                return func(*args, **kwargs)
        raise PlaceError(
            f"torch.{name} on device storage outside rt.kernel and rt.run, at {call_site()}: queued work would not have "
            "run yet. Register it with rt.register and launch it with rt.run, or look at a copy with rt.read(tensor)"
        )


def _wrap(made: Any) -> Any:
    if isinstance(made, torch.Tensor):
        return made.as_subclass(DeviceTensor)
    return type(made)(_wrap(one) for one in made)


def _is_slice(index: Any) -> bool:
    if isinstance(index, tuple):
        return all(_is_slice(one) for one in index)
    return index is None or index is Ellipsis or isinstance(index, (int, slice)) and not isinstance(index, bool)


def _to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    return isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu"


OWNERS: dict[int, weakref.ref[Any]] = {}
"""Storage address -> the runtime whose queues must be drained before a read."""


def own(tensor: torch.Tensor, runtime: Any) -> DeviceTensor:
    """Make ``tensor``'s storage device storage of ``runtime``."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    OWNERS[address] = weakref.ref(runtime)
    weakref.finalize(storage, OWNERS.pop, address, None)
    return tensor.as_subclass(DeviceTensor)


def _owner(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        address = tensor.untyped_storage().data_ptr()
    owner = OWNERS.get(address)
    return owner() if owner is not None else None


def plain(arg: Any) -> Any:
    """``arg`` as a plain torch tensor (tuples included); other values unchanged. For queued work."""
    if type(arg) is DeviceTensor:
        return arg.as_subclass(torch.Tensor)
    if type(arg) is tuple:
        return tuple(plain(one) for one in arg)
    return arg
