"""The native policy network, as one autograd operation on sequences."""

from collections.abc import Sequence
from ctypes import POINTER, Array, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.leyline.actions import CANONICAL_CHOICE, HEADS, RELEVANT_HEADS, Op
from esper.native import library as native
from esper.native.library import SUFFIXES, Handle, Pointers, addresses, function
from esper.native.structures import Struct, definitions
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.policy.interface import RecurrentState

CALLS = definitions("policy")
CHOOSE = CALLS.enums["Choose"]


Sizes = tuple[tuple[str, Any], ...]
"""Layer widths of the network, with the names of the fields of ``PolicySpec``."""


@cache
def _spec(sizes: Sizes) -> tuple[Struct, Pointers]:
    """Layer widths and the table of relevant heads as a C struct, and the memory it points to."""
    at = Pointers()
    relevant = [head in RELEVANT_HEADS[op] for op in Op for head in HEADS]
    numbers = dict(sizes)
    widths = numbers.pop("widths")
    spec = CALLS.PolicySpec(
        **numbers,
        choices=len(widths),
        widths=at.of(widths),
        relevant=at.of(relevant, torch.uint8),
        canonical=at.of([CANONICAL_CHOICE.get(head, 0) for head in HEADS]),
    )
    return spec, at


def available(dtype: torch.dtype) -> bool:
    """Whether the library is available and supports ``dtype``."""
    return dtype in SUFFIXES and native.available()


class Library:
    """The native library's policy functions for one dtype.

    Raises:
        Unavailable: see ``esper.native.library``.
    """

    def __init__(self, dtype: torch.dtype):
        suffix, call, pointers = SUFFIXES[dtype], CALLS.PolicyCall, POINTER(c_void_p)
        types = (CALLS.PolicySpec, pointers, call, c_int, pointers)
        gradients = (c_void_p, c_void_p, c_void_p, pointers, c_int)
        self.forward = function(f"policy_forward_{suffix}", *types)
        self.forward_again = function(f"policy_forward_again_{suffix}", c_void_p, call, c_int)
        self.backward = function(f"policy_backward_{suffix}", c_void_p, *gradients)
        self.free = f"policy_free_{suffix}"


@cache
def library_for(dtype: torch.dtype) -> Library:
    """The functions for ``dtype``, cached; see ``Library``."""
    return Library(dtype)


@dataclass(slots=True)
class _Result:
    """Outputs of a call, see ``PolicyCall`` in ``policy/calls.h``."""

    actions: Tensor
    log_prob: Tensor
    entropy: Tensor
    value: Tensor
    choice: Tensor
    hidden: RecurrentState


class PackedWeights:
    """Caches packed weights, for consecutive steps with equal shapes and unchanged weights."""

    def __init__(self) -> None:
        self._shape: torch.Size | None = None
        self._network: tuple[Handle, Array[c_void_p]] | None = None

    def forward(
        self,
        library: Library,
        sizes: Sizes,
        parameters: Sequence[Tensor],
        call: Struct,
        shape: torch.Size,
        threads: int,
    ) -> None:
        """Compute one step whose ``observation.slots`` has ``shape``."""
        if self._network is not None and self._shape == shape:
            library.forward_again(self._network[0].address, call, threads)
            return
        network, weights = Handle(library.free), addresses(parameters)
        library.forward(_spec(sizes)[0], weights, call, threads, network.address)
        self._network, self._shape = (network, weights), shape


def act(
    sizes: Sizes,
    parameters: Sequence[Tensor],
    observation: Observation,
    hidden: RecurrentState,
    noise: Tensor | None,
    threads: int,
    packed: PackedWeights | None,
) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
    """See ``FactoredLSTM.act``."""
    actions = torch.empty(len(observation.host), len(HEADS), dtype=torch.long)
    call, result, at = _call(sizes, observation, actions, hidden)
    call.choose = CHOOSE.index("most_probable" if noise is None else "sampled")
    if noise is not None:
        call.uniform, call.widest = at.to(noise, torch.float32), noise.shape[-1]
    library, shape = library_for(parameters[0].dtype), observation.slots.shape
    (packed or PackedWeights()).forward(library, sizes, parameters, call, shape, threads)
    return result.actions, result.log_prob, result.value, result.hidden


def evaluate(
    sizes: Sizes,
    parameters: Sequence[Tensor],
    observation: Observation,
    actions: Tensor,
    hidden: RecurrentState,
    threads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of ``Evaluation``, in order; see ``FactoredLSTM.evaluate_actions``."""
    evaluation: tuple[Tensor, Tensor, Tensor, Tensor] = _Evaluate.apply(
        sizes, observation, actions, hidden, threads, *parameters
    )
    return evaluation


class _Evaluate(torch.autograd.Function):
    """The network on sequences, differentiable with respect to its parameters."""

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
        """The fields of ``Evaluation``, in order."""
        library = library_for(parameters[0].dtype)
        call, result, at = _call(sizes, observation, actions.contiguous(), hidden)
        network, weights = Handle(library.free), addresses(parameters)
        address = network.address if any(ctx.needs_input_grad) else None
        library.forward(_spec(sizes)[0], weights, call, threads, address)
        ctx.save_for_backward(*parameters)
        # The library reads inputs and parameters again in the backward pass.
        ctx.resources = network, weights, at, result.actions, threads
        ctx.mark_non_differentiable(result.choice)
        return result.log_prob, result.entropy, result.choice, result.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the parameters; other inputs get None."""
        parameters = ctx.saved_tensors
        network, _, _, _, threads = ctx.resources
        if not network.address:
            raise RuntimeError(
                "native policy: backward can run only once per evaluation; evaluate again"
            )
        at, dtype = Pointers(), parameters[0].dtype
        d_log_prob, d_entropy, _, d_value = gradients
        output_gradients = [at.to(gradient, dtype) for gradient in (d_log_prob, d_entropy, d_value)]
        sums = parameters[0].new_zeros(sum(p.numel() for p in parameters))
        parameter_gradients = [
            part.view_as(p)
            for part, p in zip(sums.split([p.numel() for p in parameters]), parameters, strict=True)
        ]
        library = library_for(dtype)
        library.backward(
            network.address, *output_gradients, addresses(parameter_gradients), threads
        )
        network.free()
        return (*[None] * 5, *parameter_gradients)


def _call(
    sizes: Sizes, observation: Observation, actions: Tensor, hidden: RecurrentState
) -> tuple[Struct, _Result, Pointers]:
    """A call on ``observation [T, N]`` or on one step ``[N]``, its outputs and its addresses."""
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
    assert masks.kinds.shape[-1] == dict(sizes)["blueprints"]
    call = CALLS.PolicyCall(
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
        uniform=None,
        widest=0,
        actions=at.into(actions),
        log_prob=at.into(result.log_prob),
        entropy=at.into(result.entropy),
        value=at.into(result.value),
        choice=at.into(result.choice),
        hidden_after=at.into(result.hidden[0]),
        cell_after=at.into(result.hidden[1]),
    )
    return call, result, at
