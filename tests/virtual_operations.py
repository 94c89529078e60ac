"""What reaches torch's dispatcher on a virtual device: checks, counts, and devices of results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from virtual_cuda import Call, tensors_in
from virtual_machine import CPU, Machine

WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive",
    "unique_dim", "equal", "repeat_interleave", "bincount",
}  # fmt: skip
"""Operations whose result, or the shape of it, the host has to read."""

FREE = {"detach", "alias", "lift_fresh", "lift", "_local_scalar_dense", "set_", "resize_"}
"""Operations that launch nothing."""

WITH_NUMBERS = {"where", "fill_", "masked_fill", "masked_fill_", "index_put", "index_put_", "clamp"}
"""Operations that are not elementwise by torch's tags but take a CPU tensor of one number."""


class Operations(TorchDispatchMode):
    """What reaches the dispatcher: checks, counts, and devices of results."""

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        machine = self.machine
        if machine.thread.resting:
            return function(*args, **kwargs)
        name = function._schema.name.removeprefix("aten::")
        inputs = [*tensors_in(args, kwargs)]
        written = _written(function, args, kwargs)
        device = self._device(function, name, args, inputs, written)
        if device.type == "cpu":
            if not function.is_view:
                self._check_host(inputs, written)
            result = function(*args, **kwargs)
            if not inputs and machine.thread.target is None:
                _mark_unknown(result)
            return result
        if name in WAITING or _by_mask(name, args):
            machine.wait(name, device)
        if name == "copy_":
            self._copy(args[0], args[1], kwargs.get("non_blocking", args[2:] == (True,)))
        if machine.is_capturing():
            self._check_capture(function, name, device, kwargs, written)
        result = function(*args, **kwargs)
        self._own(function, name, device, args, kwargs, inputs, written, result)
        return result

    def _device(
        self, function: Any, name: str, args: Any, inputs: list[Tensor], written: list[Tensor]
    ) -> torch.device:
        """The device on which an operation runs."""
        machine = self.machine
        target = machine.thread.target
        if target is not None and "device" in _arguments(function):
            return target
        found = {machine.where(x) for x in inputs if not _unknown(x)}
        found.discard(CPU)
        if not found:
            return CPU
        if name == "copy_":
            device = machine.where(args[0])
            return device if device.type == "cuda" else machine.where(args[1])
        if len(found) > 1:
            machine.fault(f"{name}: tensors on {', '.join(sorted(map(str, found)))}")
        (device,) = found
        indices = (
            args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else []
        )
        with_numbers = torch.Tag.pointwise in function.tags or name in WITH_NUMBERS
        for x in inputs:
            if _unknown(x):
                machine.put(x, device)
            elif machine.where(x).type == "cpu":
                if any(x is i for i in indices):
                    machine.transfer(x, device, False, f"{name} with indices on the CPU")
                elif not (with_numbers and x.ndim == 0 and not any(x is w for w in written)):
                    machine.fault(f"{name}: a tensor {list(x.shape)} on cpu beside {device}")
        return device

    def _check_host(self, inputs: list[Tensor], written: list[Tensor]) -> None:
        for x in inputs:
            self.machine.check_arrived(x)
        for x in written:
            self.machine.check_read(x)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        machine = self.machine
        to, of = machine.where(target), machine.where(source)
        if to == of:
            return
        if "cpu" not in (to.type, of.type):
            machine.transfer(source, to, non_blocking, "copy_ between devices")
        elif to.type == "cpu":
            self.machine.check_read(target)
            pinned = getattr(target.untyped_storage(), "pinned", False)
            machine.transfer(source, to, non_blocking and pinned, "copy_ to the host")
            if non_blocking and pinned:
                machine.mark_coming(target, of)
        else:
            machine.check_arrived(source)
            machine.transfer(source, to, non_blocking, "copy_ from the host")

    def _check_capture(
        self, function: Any, name: str, device: torch.device, kwargs: Any, written: list[Tensor]
    ) -> None:
        machine, capture = self.machine, self.machine.capture
        assert capture is not None
        if device != capture.stream.device:
            machine.fault(f"{name} on {device} in a capture of {capture.stream.device}")
        if machine.current_stream(device) is not capture.stream:
            machine.fault(f"{name} on another stream in a capture")
        generator = kwargs.get("generator")
        if generator is not None and generator not in capture.graph.generators:
            machine.fault(f"{name} with a generator that is not registered with the graph")
        for x in written:
            storage = x.untyped_storage()
            if machine.where(x).type == "cuda" and storage._cdata not in capture.own:
                capture.before.setdefault(storage._cdata, (storage, storage.clone()))

    def _own(
        self, function: Any, name: str, device: torch.device, args: Any, kwargs: Any,
        inputs: list[Tensor], written: list[Tensor], result: Any,
    ) -> None:  # fmt: skip
        """Put new results on the device, count the launch, and record it in a capture."""
        machine = self.machine
        outputs = [*tensors_in(result)]
        known = {x.untyped_storage()._cdata for x in inputs}
        fresh = {
            position: x
            for position, x in enumerate(outputs)
            if x.untyped_storage()._cdata not in known
        }
        for x in fresh.values():
            machine.put(x, device)
        if not (fresh or written) or name in FREE or name.startswith("empty"):
            return
        machine.note_launch(device, name)
        if machine.is_capturing() and machine.capture is not None:
            capture = machine.capture
            capture.own |= {x.untyped_storage()._cdata for x in fresh.values()}

            def baked(x: Tensor) -> Tensor:
                return x.clone() if machine.where(x).type == "cpu" and x.ndim == 0 else x

            with machine.resting():
                held_args, held = tree_map_only(Tensor, baked, (args, kwargs))
            call = Call(function, held_args, held, fresh)
            capture.graph.calls.append(call)


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation changes."""
    schema = function._schema
    if not schema.is_mutable:
        return []
    found: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += tensors_in(value)
    return found


def _arguments(function: Any) -> set[str]:
    return {argument.name for argument in function._schema.arguments}


def _by_mask(name: str, args: Any) -> bool:
    """Whether the host has to count the true elements of a mask."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    # One number in the place of a mask is a fill.
    filled = name != "index" and len(args[1]) == 1 and args[2].numel() == 1
    return bool(masks) and not filled


def _mark_unknown(result: Any) -> None:
    """Autograd made it in C++: it belongs where it is first used."""
    if isinstance(result, Tensor):
        result.untyped_storage().unknown = True  # type: ignore[attr-defined]


def _unknown(x: Tensor) -> bool:
    storage = x.untyped_storage()
    return getattr(storage, "unknown", False) and getattr(storage, "held", None) is None
