"""Which layers of a module share channels, so that they can only be widened together.

A forward pass is recorded, function by function. A linear layer, a convolution or a recurrent layer
*writes* channels; whatever computes each channel from itself alone (activations, pooling, reshapes,
batch norms, depthwise convolutions) passes them on; a linear layer or a convolution behind it
*reads* them. Sums and products of two activations tie their channels, and in a concatenation each
group keeps its place. A function that mixes the channels of a group, such as a layer norm or
attention, refuses the group by its name.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from esper.kasmina.nested import map_leaves, tensors
from esper.kasmina.wider_layers import BatchNorm, Convolution

_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_TIES = {"add", "__add__", "__radd__", "__iadd__", "add_", "sub", "__sub__", "__isub__", "sub_"}
_TIES |= {"mul", "__mul__", "__rmul__", "__imul__", "mul_"}
_CONCATENATIONS = {"cat", "concat", "concatenate"}


@dataclass(frozen=True, slots=True, eq=False)
class ChannelGroup:
    """Channels that can be widened.

    Attributes:
        channels: their number.
        writers: names of the layers that compute them; those of a residual stream are several.
        companions: names of batch norms and depthwise convolutions with parameters per channel.
        readers: by the name of each layer that reads them, how many of its inputs belong to one
            channel: several after a convolution that is flattened.
        layouts: by the name of a companion or reader behind a concatenation, its parts in order: a
            layer that writes the part, or an empty name and the length of one that stays.
    """

    channels: int
    writers: tuple[str, ...]
    companions: tuple[str, ...]
    readers: Mapping[str, int]
    layouts: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The names of the writers."""
        return " + ".join(self.writers)


@dataclass(eq=False)
class _Group:
    channels: int
    writers: list[str]
    companions: list[str] = field(default_factory=list)
    readers: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    combination: str = ""
    is_output: bool = False
    parts: list[tuple["_Group | None", int]] = field(default_factory=list)
    """Of a concatenation, which has no writers: its groups and what belongs to none."""
    layouts: dict[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)

    def join(self, other: "_Group") -> None:
        self.writers += other.writers
        self.companions += other.companions
        self.readers |= other.readers
        self.reason = self.reason or other.reason
        self.combination = self.combination or other.combination


@dataclass(frozen=True, slots=True)
class _Tag:
    """Where the channels of a group lie in a tensor: on ``axis``, ``block`` entries each."""

    group: _Group
    axis: int
    block: int


def channel_groups(
    model: nn.Module, run: Callable[[], Any]
) -> tuple[list[ChannelGroup], dict[str, str]]:
    """The groups of channels of a module.

    Args:
        model: the module, in evaluation mode.
        run: runs a forward pass without gradients.

    Returns:
        - The groups that can be widened, in the order of their first writer.
        - By name of a group that cannot, why not. Outputs of the module are not listed.
    """
    recorder = _Recorder(model)
    with recorder:
        output = run()
    for leaf in tensors(output):
        if (tag := recorder.tag(leaf)) is not None:
            tag.group.is_output = True
    recorder.resolve_concatenations()
    wide, reasons = [], {}
    for group in recorder.groups():
        if group.is_output:
            continue
        layers = [*group.writers, *group.readers, *group.companions]
        repetitions = [name for name in layers if recorder.calls[name] > 1]
        if repetitions:
            group.reason = f"{repetitions[0]} is called {recorder.calls[repetitions[0]]} times"
        parameters = [p for name in layers for p in model.get_submodule(name).parameters(False)]
        if not all(p.requires_grad for p in parameters):
            group.reason = group.reason or "a layer is frozen"
        if any(recorder.uses[id(p)] > 1 for p in parameters):
            group.reason = group.reason or "a layer shares its parameters with another module"
        group.reason = group.reason or group.combination
        if not group.readers:
            group.reason = group.reason or "no layer reads it"
        result = ChannelGroup(
            group.channels,
            tuple(group.writers),
            tuple(group.companions),
            group.readers,
            group.layouts,
        )
        if group.reason:
            reasons[result.name] = group.reason
        else:
            wide.append(result)
    return wide, reasons


class _Recorder(TorchFunctionMode):
    """Follows the channels of every layer through the functions of a forward pass."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._tags: dict[int, tuple[Tensor, _Tag]] = {}
        self._parents: dict[_Group, _Group] = {}
        self._all: list[_Group] = []
        self._owners = {
            id(x): (name, module)
            for name, module in model.named_modules()
            for x in (*module._parameters.values(), *module._buffers.values())
            if x is not None
        }
        self.uses = Counter(
            id(p) for module in model.modules() for p in module._parameters.values()
        )

    def groups(self) -> list[_Group]:
        """The groups that were not joined to another."""
        return [each for each in self._all if each not in self._parents and not each.parts]

    def resolve_concatenations(self) -> None:
        """Give what a concatenation passes through and what reads it to the groups in it."""
        for each in self._all:
            parts = [(None if g is None else self._root(g), length) for g, length in each.parts]
            layout = tuple(
                ("", length) if group is None else (group.writers[0], 0) for group, length in parts
            )
            groups = [group for group, _ in parts if group is not None]
            for group in groups:
                group.reason = group.reason or each.reason or each.combination
                if groups.count(group) > 1:
                    group.reason = group.reason or "it is concatenated with itself"
                group.is_output |= each.is_output
                group.readers |= each.readers
                group.companions += each.companions
                group.layouts |= dict.fromkeys((*each.companions, *each.readers), layout)

    def _root(self, group: _Group) -> _Group:
        """The group, or the one that it was joined to."""
        while group in self._parents:
            group = self._parents[group]
        return group

    def tag(self, x: object) -> _Tag | None:
        """Where the channels of a tensor lie; None where they belong to no layer."""
        entry = self._tags.get(id(x))
        if entry is None:
            return None
        tag = entry[1]
        return _Tag(self._root(tag.group), tag.axis, tag.block)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = list(tensors((args, kwargs)))
        tags = {id(x): tag for x in inputs if (tag := self.tag(x)) is not None}
        name = getattr(func, "__name__", str(func))
        if name in ("linear", "conv1d", "conv2d", "conv3d"):
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            owner, layer = self._owners.get(id(weight), ("", None))
            if isinstance(layer, nn.Linear | Convolution):
                output = func(*args, **kwargs)
                self._layer(owner, layer, args[0] if args else kwargs["input"], output)
                return output
        if name in _RECURRENT and (owner := self._recurrent_owner(inputs)):
            outputs = func(*args, **kwargs)
            self._recurrent(owner, [tags[id(x)] for x in inputs if id(x) in tags], outputs)
            return outputs
        if len(tags) == 0:
            return func(*args, **kwargs)
        if name in _CONCATENATIONS and (concatenation := self._concatenation(*args, **kwargs)):
            output = func(*args, **kwargs)
            self._tags[id(output)] = output, concatenation
            return output
        # Before the function, which may work in place.
        source = next(x for x in inputs if id(x) in tags)
        locations: list[_Tag | None] = []
        if len(tags) == 1:
            tag = tags[id(source)]
            locations = self._locations(func, args, kwargs, source, tag)
            if None not in locations and self._meets_fixed_size(inputs, source, tag):
                tag.group.combination = f"{name} combines it with other channels"
        output = func(*args, **kwargs)
        outputs = list(tensors(output))
        if len(tags) > 1:
            locations = [self._sum_tag(name, list(tags.values()))] * len(outputs)
        if not outputs:
            return output  # its shape, or another number
        if len(locations) != len(outputs) or None in locations:
            for tag in tags.values():
                tag.group.reason = tag.group.reason or f"{name} mixes its channels"
            return output
        self._companion(inputs, tags[id(source)], name)
        for x, tag in zip(outputs, locations, strict=True):
            assert tag is not None
            self._tags[id(x)] = x, tag
        return output

    def _concatenation(
        self, tensors: Sequence[Tensor], dim: int = 0, axis: int | None = None, **_: Any
    ) -> _Tag | None:
        """Where the channels of tensors lie that are concatenated on their axis of channels."""
        joint = (dim if axis is None else axis) % tensors[0].ndim
        parts: list[tuple[_Group | None, int]] = []
        for x in tensors:
            tag = self.tag(x)
            if tag is not None and (tag.axis, tag.block) != (joint, 1):
                return None
            group = None if tag is None else tag.group
            parts += group.parts if group and group.parts else [(group, x.shape[joint])]
        group = _Group(sum(length for _, length in parts), [], parts=parts)
        self._all.append(group)
        return _Tag(group, joint, 1)

    def _meets_fixed_size(self, inputs: list[Tensor], source: Tensor, tag: _Tag) -> bool:
        """Whether another tensor, of no layer or parameter, is as long on the axis of channels."""
        size, offset = source.shape[tag.axis], tag.axis - source.ndim
        partners = (x for x in inputs if x is not source and id(x) not in self._owners)
        return any(x.ndim >= -offset and x.shape[offset] == size for x in partners)

    def _layer(self, name: str, layer: Any, x: Tensor, output: Tensor) -> None:
        """A linear layer or a convolution: reads the channels of ``x``, and writes others."""
        self.calls[name] += 1
        tag = self.tag(x)
        is_linear = isinstance(layer, nn.Linear)
        axis = output.ndim - 1 if is_linear else output.ndim - layer.weight.ndim + 1
        if not is_linear and layer.groups > 1:
            depthwise = layer.groups == layer.in_channels == layer.out_channels
            if tag is not None and depthwise and (tag.axis, tag.block) == (axis, 1):
                tag.group.companions.append(name)
                self._tags[id(output)] = output, tag
            elif tag is not None:
                tag.group.reason = f"{name} reads it in groups"
            return
        if tag is not None:
            if tag.axis == axis:
                tag.group.readers[name] = tag.block
            else:
                tag.group.reason = f"{name} does not read it on its axis of channels"
        group = _Group(output.shape[axis], [name])
        self._all.append(group)
        self._tags[id(output)] = output, _Tag(group, axis, 1)

    def _recurrent_owner(self, inputs: list[Tensor]) -> tuple[str, nn.RNNBase] | None:
        """The recurrent layer whose parameters are among the inputs of a function."""
        owners = (self._owners[id(x)] for x in inputs if id(x) in self._owners)
        return next(((n, each) for n, each in owners if isinstance(each, nn.RNNBase)), None)

    def _recurrent(
        self, owner: tuple[str, nn.RNNBase], tags: list[_Tag], outputs: tuple[Tensor, ...]
    ) -> None:
        """A recurrent layer: mixes the channels that it reads, and writes its hidden units."""
        name, layer = owner
        self.calls[name] += 1
        for tag in tags:
            tag.group.reason = tag.group.reason or f"{name} mixes its channels over time"
        group = _Group(layer.hidden_size, [name])
        if layer.bidirectional or layer.proj_size:
            group.reason = "it has two directions, or projects its hidden units"
        self._all.append(group)
        for x in outputs:
            self._tags[id(x)] = x, _Tag(group, x.ndim - 1, 1)

    def _companion(self, inputs: list[Tensor], tag: _Tag, function: str) -> None:
        """Note the module whose parameters or buffers a function applies to the channels."""
        owners = {self._owners[id(x)] for x in inputs if id(x) in self._owners}
        for name, module in owners:
            if isinstance(module, BatchNorm) and tag.block == 1:
                self.calls[name] += 1
                tag.group.companions.append(name)
            elif any(x.numel() > 1 for x in inputs if id(x) in self._owners):
                holder = name or "the module"
                tag.group.reason = f"{function} has parameters of {holder} per channel"

    def _sum_tag(self, name: str, tags: list[_Tag]) -> _Tag | None:
        """What a function of several groups yields: one group, if it adds or multiplies them."""
        first, *more = sorted(tags, key=lambda tag: self._all.index(tag.group))
        alike = all((t.axis, t.block) == (first.axis, first.block) for t in more)
        alike = alike and all(t.group.channels == first.group.channels for t in more)
        is_joint = any(t.group is not first.group for t in more)
        if name not in _TIES or not alike or (is_joint and any(t.group.parts for t in tags)):
            return None
        for tag in more:
            if tag.group is not first.group:
                first.group.join(tag.group)
                self._parents[tag.group] = first.group
        return first

    def _locations(
        self, func: Any, args: Any, kwargs: Any, x: Tensor, tag: _Tag
    ) -> list[_Tag | None]:
        """Where the channels lie in each output; None where they are mixed.

        Other values in one channel of the input must change that channel of the output alone.
        """
        generator = torch.Generator().manual_seed(0)
        size = torch.randn(x.shape, generator=generator).abs().to(x.device, x.dtype)
        # Of either sign, so that no activation function maps both to the alike value.
        base, negative = size, -size.flip(0)

        def outputs(value: Tensor) -> list[Tensor]:
            def swap(each: Any) -> Any:
                return value.clone() if each is x else each

            return list(tensors(func(*map_leaves(args, swap), **map_leaves(kwargs, swap))))

        channels = sorted({0, tag.group.channels // 2, tag.group.channels - 1})
        reference, changes = outputs(base), []
        for channel in channels:
            value = base.clone()
            entries = slice(channel * tag.block, (channel + 1) * tag.block)
            index = (slice(None),) * tag.axis + (entries,)
            value[index] = negative[index]
            changes.append([a != b for a, b in zip(outputs(value), reference, strict=True)])
        return [
            _location(tag, x.shape, [each[i] for each in changes], channels)
            for i in range(len(reference))
        ]


def _location(
    tag: _Tag, shape: torch.Size, changes: list[Tensor], channels: list[int]
) -> _Tag | None:
    """The axis of an output on which each changed channel is a block of its own; else None.

    Args:
        tag: where the channels are in the input.
        shape: shape of the input.
        changes: by changed channel, which entries of the output changed.
        channels: the changed channels.
    """
    size = changes[0].shape
    axes = list(range(len(size)))
    if tag.group.channels == 1:
        # Every axis holds one block.
        axes = [tag.axis] if size == shape else []
    for axis in axes:
        block, remainder = divmod(size[axis], tag.group.channels)
        if remainder or not block:
            continue
        crossing = [each for each in axes if each != axis]
        positions = [(c.any(crossing) if crossing else c).nonzero()[:, 0] // block for c in changes]
        if all(
            len(p) > 0 and bool((p == channel).all())
            for p, channel in zip(positions, channels, strict=True)
        ):
            return _Tag(tag.group, axis, block)
    return None
