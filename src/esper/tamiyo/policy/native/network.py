"""Hands sequences over to the native library, as one operation of autograd."""

import ctypes
import logging
from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.leyline.actions import CANONICAL_CHOICE, HEADS, RELEVANT_HEADS, Op
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.policy.interface import RecurrentState
from esper.tamiyo.policy.native.interface import (
    CHOOSE,
    Library,
    PolicyCall,
    PolicySpec,
    library_for,
)
from esper.tolaria.backends.native.build import Unavailable
from esper.tolaria.backends.native.interface import SUFFIXES, Pointers


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths of the network's layers, by the names of ``PolicySpec``."""

    host_features: int
    slot_features: int
    critic_features: int
    blueprints: int
    kind_width: int
    slot_width: int
    hidden: int
    ops: int
    op_width: int
    op_hidden: int
    slot_hidden: int
    trunk: int
    value_hidden: int
    widths: tuple[int, ...]


@cache
def _spec(sizes: Sizes) -> PolicySpec:
    """Sizes and causal table as the library reads them."""
    relevant = [head in RELEVANT_HEADS[op] for op in Op for head in HEADS]
    canonical = [CANONICAL_CHOICE.get(head, 0) for head in HEADS]
    arrays: dict[str, ctypes.Array[Any]] = {
        "widths": (ctypes.c_int32 * len(sizes.widths))(*sizes.widths),
        "relevant": (ctypes.c_uint8 * len(relevant))(*relevant),
        "canonical": (ctypes.c_int32 * len(canonical))(*canonical),
    }
    numbers = {name: getattr(sizes, name) for name in Sizes.__slots__ if name != "widths"}
    spec = PolicySpec(
        choices=len(sizes.widths),
        **numbers,
        **{name: ctypes.addressof(array) for name, array in arrays.items()},
    )
    spec.kept = arrays
    return spec


@cache
def available(dtype: torch.dtype) -> bool:
    """Whether the library computes in ``dtype`` here; one line of the log says why not."""
    if dtype not in SUFFIXES:
        return False
    try:
        library_for(dtype)
    except Unavailable as reason:
        logging.getLogger(__name__).warning(f"native policy: {reason}; using torch")
        return False
    return True


@dataclass(slots=True)
class _Result:
    """What a call writes, see ``calls.h``."""

    actions: Tensor
    log_prob: Tensor
    entropy: Tensor
    value: Tensor
    choice: Tensor
    hidden: RecurrentState


class _Network:
    """What a forward pass leaves for the backward pass, once."""

    def __init__(self, library: Library):
        self.library, self.handle = library, c_void_p()

    def __del__(self) -> None:
        self.free()

    def free(self) -> None:
        if self.handle:
            self.library.free(self.handle)
            self.handle = c_void_p()


class PackedWeights:
    """The network with its weights laid out, for steps of one shape between which none changes."""

    def __init__(self) -> None:
        self._shape: torch.Size | None = None
        self._made: tuple[_Network, ctypes.Array[c_void_p]] | None = None

    def forward(
        self,
        library: Library,
        sizes: Sizes,
        parameters: Sequence[Tensor],
        call: PolicyCall,
        shape: torch.Size,
        threads: int,
    ) -> None:
        """One step of ``shape``."""
        if self._made is not None and self._shape == shape:
            library.again(self._made[0].handle, ctypes.byref(call), threads)
            return
        network, addresses = _Network(library), _addresses(parameters)
        kept = ctypes.byref(network.handle)
        library.forward(_spec(sizes), addresses, ctypes.byref(call), threads, kept)
        self._made, self._shape = (network, addresses), shape


def act(
    sizes: Sizes,
    parameters: Sequence[Tensor],
    observation: Observation,
    hidden: RecurrentState,
    noise: Tensor | None,
    threads: int,
    held: PackedWeights | None,
) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
    """See ``FactoredLSTM.act``."""
    heads = 2 + len(sizes.widths)
    actions = torch.empty(len(observation.host), heads, dtype=torch.long)
    call, result, at = _call(sizes, observation, actions, hidden)
    call.choose = CHOOSE.index("most probable" if noise is None else "sampled")
    if noise is not None:
        call.uniform, call.widest = at.to(noise, torch.float32), noise.shape[-1]
    library, shape = library_for(parameters[0].dtype), observation.slots.shape
    (held or PackedWeights()).forward(library, sizes, parameters, call, shape, threads)
    return result.actions, result.log_prob, result.value, result.hidden


def evaluate(
    sizes: Sizes,
    parameters: Sequence[Tensor],
    observation: Observation,
    actions: Tensor,
    hidden: RecurrentState,
    threads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``Evaluation`` holds, in its order; see ``FactoredLSTM.evaluate_actions``."""
    said: tuple[Tensor, Tensor, Tensor, Tensor] = _Evaluate.apply(
        sizes, observation, actions, hidden, threads, *parameters
    )
    return said


class _Evaluate(torch.autograd.Function):
    """The network on sequences, differentiable by its parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        sizes: Sizes,
        observation: Observation,
        actions: Tensor,
        hidden: RecurrentState,
        threads: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        library = library_for(parameters[0].dtype)
        call, result, at = _call(sizes, observation, actions.contiguous(), hidden)
        network, addresses = _Network(library), _addresses(parameters)
        wanted = ctypes.byref(network.handle) if any(ctx.needs_input_grad) else None
        library.forward(_spec(sizes), addresses, ctypes.byref(call), threads, wanted)
        ctx.save_for_backward(*parameters)
        # The library reads inputs and parameters once more in the backward pass.
        ctx.kept = network, addresses, at, result.actions, threads
        ctx.mark_non_differentiable(result.choice)
        return result.log_prob, result.entropy, result.choice, result.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parameters = ctx.saved_tensors
        network, _, _, _, threads = ctx.kept
        if not network.handle:
            raise RuntimeError("the native policy goes backward once")
        at, dtype = Pointers(), parameters[0].dtype
        d_log_prob, d_entropy, _, d_value = gradients
        given = [at.to(gradient, dtype) for gradient in (d_log_prob, d_entropy, d_value)]
        sums = parameters[0].new_zeros(sum(p.numel() for p in parameters))
        found = [
            part.view_as(p)
            for part, p in zip(sums.split([p.numel() for p in parameters]), parameters, strict=True)
        ]
        network.library.backward(network.handle, *given, _addresses(found), threads)
        network.free()
        return (*[None] * 5, *found)


def _call(
    sizes: Sizes, observation: Observation, actions: Tensor, hidden: RecurrentState
) -> tuple[PolicyCall, _Result, Pointers]:
    """A call on ``observation [T, N]``, or on one step ``[N]``, and what it fills."""
    leading, dtype = actions.shape[:-1], observation.host.dtype
    steps = leading[0] if len(leading) > 1 else 1

    def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*leading, *shape, dtype=kind)

    result = _Result(
        actions=actions,
        log_prob=empty(),
        entropy=empty(actions.shape[-1]),
        value=empty(),
        choice=empty(actions.shape[-1], kind=torch.bool),
        hidden=(torch.empty_like(hidden[0]), torch.empty_like(hidden[1])),
    )
    masks, at = observation.masks, Pointers()
    assert masks.kinds.shape[-1] == sizes.blueprints
    call = PolicyCall(
        steps=steps,
        environments=leading[-1],
        slots=observation.slots.shape[-2],
        host=at.to(observation.host),
        slot=at.to(observation.slots, dtype),
        critic=at.to(observation.critic, dtype),
        blueprint=at.to(observation.blueprints),
        may=at.to(masks.slots),
        kinds=at.to(masks.kinds),
        hidden=at.to(hidden[0], dtype),
        cell=at.to(hidden[1], dtype),
        choose=CHOOSE.index("given"),
        actions=at.into(actions),
        log_prob=at.into(result.log_prob),
        entropy=at.into(result.entropy),
        value=at.into(result.value),
        choice=at.into(result.choice),
        hidden_after=at.into(result.hidden[0]),
        cell_after=at.into(result.hidden[1]),
    )
    return call, result, at


def _addresses(tensors: Sequence[Tensor]) -> "ctypes.Array[c_void_p]":
    assert all(tensor.is_contiguous() for tensor in tensors)
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
