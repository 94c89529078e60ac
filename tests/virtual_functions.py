"""What Python calls on tensors of a virtual device: their device, ``to``, factories."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from virtual_cuda import Call, tensors_in
from virtual_machine import CPU, Machine


class Functions(TorchFunctionMode):
    """What Python sees: devices of tensors, ``to``, factories."""

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        handler = HANDLERS.get(function)
        if handler is not None:
            return handler(self.machine, function, args, kwargs)
        thread = self.machine.thread
        before = thread.target
        if function is Tensor.new_tensor:
            kwargs.setdefault("device", self.machine.where(args[0]))
        pinned = bool(kwargs.get("pin_memory"))
        if pinned:
            kwargs["pin_memory"] = False
        if kwargs.get("device") is not None:
            thread.target = self.machine.device_of(kwargs["device"])
            if thread.target.type == "cuda":
                kwargs["device"] = CPU
        elif any(True for _ in tensors_in(args, kwargs)):
            thread.target = None
        else:
            thread.target = CPU
        try:
            result = function(*args, **kwargs)
        finally:
            target, thread.target = thread.target, before
        if pinned:
            result.untyped_storage().pinned = True
        if function in FROM_HOST and target is not None and target.type == "cuda":
            self.machine.transfer(result, target, False, function.__name__)
            with self.machine.resting():
                result = self.machine.put(result, target)
        return result


class _Moved(torch.autograd.Function):
    """A copy to another device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, machine: Machine, target: torch.device, later: bool) -> Tensor:
        ctx.machine, ctx.source = machine, machine.where(x)
        machine.check_arrived(x)
        machine.transfer(x, target, later, "to")
        with machine.resting():
            out = machine.put(x.clone(), target)
        if target.type == "cpu" and later:
            out.untyped_storage().pinned = True  # type: ignore[attr-defined]
            machine.mark_coming(out, ctx.source)
        if machine.is_capturing() and machine.capture is not None:
            capture = machine.capture
            capture.own.add(out.untyped_storage()._cdata)
            capture.graph.calls.append(Call(torch.ops.aten.clone.default, (x,), {}, {0: out}))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Moved.apply(gradient, ctx.machine, ctx.source, False), None, None, None


def _moved(machine: Machine, x: Tensor, target: torch.device, later: bool) -> Tensor:
    return x if machine.where(x) == target else _Moved.apply(x, machine, target, later)


def _to(machine: Machine, function: Any, args: Any, kwargs: Any) -> Any:
    x, *rest = args
    if (rest and isinstance(rest[0], Tensor)) or "other" in kwargs:
        other = kwargs.pop("other", None)
        other = rest.pop(0) if other is None else other
        kwargs |= {"device": machine.where(other), "dtype": other.dtype}
    device, dtype, later, layout = torch._C._nn._parse_to(*rest, **_parsable(kwargs))
    copy = kwargs.get("copy", False)
    if device is not None:
        target, host = machine.device_of(device), machine.where(x)
        # torch converts where it copies from, if that is not larger.
        if dtype is not None and host != target and dtype.itemsize <= x.dtype.itemsize:
            x = x.to(dtype)
        x = _moved(machine, x, target, later)
    options = {"memory_format": layout} if layout is not None else {}
    if dtype in (None, x.dtype) and not options and not copy:
        return x
    machine.thread.target = None
    return function(x, dtype or x.dtype, copy=copy, **options)


def _parsable(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "copy"}


def _is_on(machine: Machine, args: Any, kind: str) -> bool:
    return machine.where(args[0]).type == kind


def _get_device(machine: Machine, function: Any, args: Any, kwargs: Any) -> int:
    device = machine.where(args[0])
    return -1 if device.type == "cpu" else device.index


def _cuda(machine: Machine, function: Any, args: Any, kwargs: Any) -> Any:
    x, *rest = args
    where = rest[0] if rest else kwargs.get("device")
    return _moved(machine, x, machine.device_of(where), kwargs.get("non_blocking", False))


def _tolist(machine: Machine, function: Any, args: Any, kwargs: Any) -> Any:
    device = machine.where(args[0])
    if device.type == "cuda":
        machine.wait("tolist", device)
    machine.check_arrived(args[0])
    with machine.resting():
        return function(*args, **kwargs)


def _numpy(machine: Machine, function: Any, args: Any, kwargs: Any) -> Any:
    device = machine.where(args[0])
    if device.type == "cuda":
        raise TypeError(f"can't convert {device} device type tensor to numpy; use Tensor.cpu()")
    machine.check_arrived(args[0])
    return function(*args, **kwargs)


def _pin_memory(machine: Machine, function: Any, args: Any, kwargs: Any) -> Any:
    if machine.where(args[0]).type == "cuda":
        raise RuntimeError("cannot pin a tensor of a device: only dense CPU tensors can be pinned")
    out = args[0].clone()
    out.untyped_storage().pinned = True
    return out


def _set_item(machine: Machine, function: Any, args: Any, kwargs: Any) -> Any:
    x, index, value = args
    device = machine.where(x)
    machine.thread.target = None
    if device.type == "cuda" and not isinstance(value, Tensor):
        with machine.resting():  # torch fills a number in; it copies nothing
            value = machine.put(torch.tensor(value, dtype=x.dtype), device)
    return function(x, index, value)


FROM_HOST = {torch.tensor, torch.as_tensor, torch.scalar_tensor, Tensor.new_tensor}
"""Factories that copy numbers of the host."""

HANDLERS = {
    Tensor.to: _to,
    Tensor.cpu: lambda machine, _, args, __: _moved(machine, args[0], CPU, False),
    Tensor.cuda: _cuda,
    Tensor.device.__get__: lambda machine, _, args, __: machine.where(args[0]),  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda machine, _, args, __: _is_on(machine, args, "cuda"),  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda machine, _, args, __: _is_on(machine, args, "cpu"),  # type: ignore[attr-defined]
    Tensor.get_device: _get_device,
    Tensor.tolist: _tolist,
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.pin_memory: _pin_memory,
    Tensor.is_pinned: lambda _, __, args, ___: getattr(args[0].untyped_storage(), "pinned", False),
    Tensor.__setitem__: _set_item,
    Tensor.record_stream: lambda *_: None,
}
