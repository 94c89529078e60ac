"""A forward pass, followed function by function: whose channels lie where in each tensor."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from esper.kasmina.channel_probe import Position, positions, units_behind
from esper.kasmina.layer_kinds import (
    PREFIX,
    SIZES,
    Convolution,
    ConvTranspose,
    InputsFirst,
    Linear,
    Norm,
    channel_axis,
    has_weight_norm,
    is_per_channel,
)
from esper.kasmina.nested import map_leaves, tensors

_LAYERS = {
    "linear",
    "addmm",
    *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_BROADCASTS = {"add", "__add__", "__radd__", "__iadd__", "add_", "mul", "__mul__", "__rmul__"}
_BROADCASTS |= {"__imul__", "mul_", "layer_norm", "rms_norm", "masked_fill", "where"}
_BROADCASTS |= {"scaled_dot_product_attention"}
"""Functions that lay a parameter along the last axes of an activation."""
_SOFTMAX = {"softmax", "scaled_dot_product_attention"}
_CONCATENATIONS = {"cat", "concat", "concatenate"}

Unit = tuple[int, int]
"""See ``ChannelGroup.units``."""
Trials = dict[tuple[Any, ...], list[Position | None]]
"""By a function's call and its number, and by where the channels lie in its inputs: where in its
outputs."""


@dataclass(eq=False)
class TracedGroup:
    """A group while a forward pass is followed, see ``ChannelGroup``."""

    channels: int
    writers: list[str]
    companions: list[str] = field(default_factory=list)
    readers: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    is_mixed: bool = False
    is_balanced: bool = False
    """Whether its channels are mixed by a function that is taken to see their moments alone."""
    is_output: bool = False
    parts: list[tuple["TracedGroup | None", int]] = field(default_factory=list)
    """Of a concatenation, which has no writers: its groups and what belongs to none."""
    layouts: dict[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)
    attends: bool = False
    is_rigid: bool = False
    """Whether rows of a writer cannot be taken together."""
    options: list[Unit] = field(default_factory=list)
    """Of a group that a function mixes: units of its rows that the function keeps apart."""

    def join(self, other: "TracedGroup") -> None:
        """Tie the channels of another group to these."""
        self.coarsen(other.channels)
        other.coarsen(self.channels)
        self.writers += other.writers
        self.units |= other.units
        self.attends |= other.attends
        self.is_rigid |= other.is_rigid
        self.companions = [*dict.fromkeys(self.companions + other.companions)]
        self.readers |= other.readers
        self.reason = self.reason or other.reason
        self.is_mixed |= other.is_mixed
        self.is_balanced |= other.is_balanced

    def coarsen(self, channels: int) -> None:
        """Take several channels as one, if there are more than so many."""
        factor = self.channels // channels
        if factor > 1:
            units = {name: self.units.get(name, (1, 1)) for name in self.writers}
            self.units = {name: (gates, factor * rows) for name, (gates, rows) in units.items()}
            self.readers = {name: factor * block for name, block in self.readers.items()}
            self.channels = channels


@dataclass(frozen=True, slots=True)
class Tag:
    """Where the channels of a group lie in a tensor, of which there were so many then."""

    group: TracedGroup
    position: Position
    channels: int

    @property
    def is_plain(self) -> bool:
        """Whether each channel is one entry of the axis."""
        return (self.position.block, self.position.gates) == (1, 1)

    @property
    def is_contiguous(self) -> bool:
        """Whether the entries of each channel lie side by side, and are its only ones."""
        return self.is_plain or (self.position.gates == 1 and not self.group.parts)


class Recorder(TorchFunctionMode):
    """Follows the channels of every layer through the functions of a forward pass.

    Args:
        model: the module.
        units: by layer, what of its rows counts as a channel.
        trials: filled by the pass.
        mixable: layers whose channels a function may mix, if all of a group are among them.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, Unit],
        trials: Trials,
        mixable: Collection[str] = (),
    ):
        super().__init__()
        self._mixable = set(mixable)
        self._model, self._units, self._trials, self._number = model, units, trials, 0
        self._weights = list[Tensor]()
        self._ends: dict[tuple[str, bool], TracedGroup] = {}
        self._tags: dict[int, tuple[Tensor, Tag]] = {}
        self._parents: dict[TracedGroup, TracedGroup] = {}
        self._all: list[TracedGroup] = []
        self._owners = {
            id(x): (name, module)
            for name, module in model.named_modules()
            for x in (*module._parameters.values(), *module._buffers.values())
            if x is not None
        }
        self.uses = Counter(
            id(p) for module in model.modules() for p in module._parameters.values()
        )

    def groups(self) -> list[TracedGroup]:
        """The groups that were not joined to another."""
        return [each for each in self._all if each not in self._parents and not each.parts]

    def resolve_concatenations(self) -> None:
        """Give what a concatenation passes through and what reads it to the groups in it."""
        for each in self._all:
            parts = [(None if g is None else self._root(g), length) for g, length in each.parts]
            layout = tuple(
                ("", length) if group is None or group.units else (group.writers[0], 0)
                for group, length in parts
            )
            groups = [group for group, _ in parts if group is not None]
            for group in groups:
                group.reason = group.reason or each.reason
                if group.units:
                    group.reason = group.reason or "units of several rows are concatenated"
                if groups.count(group) > 1:
                    group.reason = group.reason or "it is concatenated with itself"
                group.is_output |= each.is_output
                group.readers |= each.readers
                group.companions += each.companions
                group.layouts |= dict.fromkeys((*each.companions, *each.readers), layout)

    def _root(self, group: TracedGroup) -> TracedGroup:
        """The group, or the one that it was joined to."""
        while group in self._parents:
            group = self._parents[group]
        return group

    def _tie(self, first: TracedGroup, second: TracedGroup) -> None:
        """Make one group of two."""
        if self._root(second) is not first:
            first.join(second)
            self._parents[second] = first

    def _end(self, name: str, writes: bool, group: TracedGroup) -> TracedGroup:
        """The group that a layer reads or writes, tied to those of its earlier calls."""
        earlier = self._root(self._ends.setdefault((name, writes), group))
        if earlier is group:
            return group
        first, second = sorted((earlier, group), key=self._all.index)
        if first.parts or second.parts or first.channels != second.channels:
            first.reason = second.reason = f"{name} is called with other channels, too"
            return group
        self._tie(first, second)
        return first

    def tag(self, x: object) -> Tag | None:
        """Where the channels of a tensor lie; None where they belong to no layer."""
        if id(x) not in self._tags:
            return None
        tag = self._tags[id(x)][1]
        root = self._root(tag.group)
        return Tag(root, tag.position.coarse(tag.channels // root.channels), root.channels)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, self._number = kwargs or {}, self._number + 1
        inputs = list(tensors((args, kwargs)))
        tags = {id(x): tag for x in inputs if (tag := self.tag(x)) is not None}
        name = getattr(func, "__name__", str(func))
        if name in _LAYERS:
            begin, keys = (1, ("mat1", "mat2")) if name == "addmm" else (0, ("input", "weight"))
            operands = dict(zip(keys, args[begin:], strict=False)) | kwargs
            owner, layer = self._owners.get(id(operands.get(keys[1])), ("", None))
            if isinstance(layer, InputsFirst if begin else nn.Linear | Convolution):
                output = func(*args, **kwargs)
                self._layer(owner, layer, operands[keys[0]], output)
                return output
        if name == "_weight_norm":
            return self._weight_of_norm(inputs, func(*args, **kwargs))
        if name in _RECURRENT and (owner := self._recurrent_owner(inputs)):
            outputs = func(*args, **kwargs)
            self._recurrent(owner, [tags[id(x)] for x in inputs if id(x) in tags], outputs)
            return outputs
        if len(tags) == 0:
            return self._of_parameters(inputs, func(*args, **kwargs))
        if name in _CONCATENATIONS and (concatenation := self._concatenation(*args, **kwargs)):
            output = func(*args, **kwargs)
            self._tags[id(output)] = output, concatenation
            return output
        # Before the function, which may work in place.
        sources = [x for x in inputs if id(x) in tags]
        locations = self._locations(func, args, kwargs, sources, tags)
        output = func(*args, **kwargs)
        outputs = list(tensors(output))
        if not outputs or not locations:
            return output  # its shape, another number, or zeros of its shape
        is_mixed = len(locations) != len(outputs) or None in locations
        groups = {tag.group for tag in tags.values()}
        if is_mixed and len(groups) == 1 and self._may_mix(*groups):
            # Of a mean, a variance and the like nothing but the layer's own shape is followed.
            starts = {x.shape: tags[id(x)].position for x in sources}
            locations = [starts.get(y.shape) for y in outputs]
        elif is_mixed:
            verb = "mixes its channels"
            if name in _LAYERS:
                verb = "reads it with a weight of no known layer"
            for tag in tags.values():
                tag.group.reason = tag.group.reason or f"{name} {verb}"
                tag.group.is_mixed = True
            return output
        for x in sources:
            self._companion(inputs, x, tags[id(x)], name)
        roots = sorted({self._root(group) for group in groups}, key=self._all.index)
        first = roots[0]
        for group in roots:
            self._tie(first, group)
        first.attends |= name in _SOFTMAX
        for x, position in zip(outputs, locations, strict=True):
            if position is not None:
                self._tags[id(x)] = x, Tag(first, position, first.channels)
        return output

    def _may_mix(self, group: TracedGroup) -> bool:
        """Whether a function may mix the channels of a group; it is noted that one does."""
        group.is_balanced |= bool(group.writers) and self._mixable.issuperset(group.writers)
        return group.is_balanced

    def _of_parameters(self, inputs: list[Tensor], output: Any) -> Any:
        """What is computed of parameters alone counts as a parameter, as in ``weight[:, None]``."""
        owners = {self._owners.get(id(x), ("", self._model)) for x in inputs}
        name, module = owners.pop() if len(owners) == 1 else ("", self._model)
        is_layer = isinstance(module, tuple(SIZES)) or any(module.children())
        if isinstance(output, Tensor) and not is_layer:
            self._owners[id(output)] = name, module
            self._weights.append(output)
        return output

    def _weight_of_norm(self, inputs: list[Tensor], weight: Tensor) -> Tensor:
        """A weight that a weight norm computes: it counts as a parameter of its layer."""
        name = self._owners.get(id(inputs[0]), ("", None))[0].removesuffix(f".{PREFIX[:-1]}")
        layer = self._model.get_submodule(name)
        if has_weight_norm(layer):
            self._owners[id(weight)] = name, layer
            self._weights.append(weight)
        return weight

    def _concatenation(
        self, tensors: Sequence[Tensor], dim: int = 0, axis: int | None = None, **_: Any
    ) -> Tag | None:
        """Where the channels of tensors lie that are concatenated on their axis of channels."""
        joint = (dim if axis is None else axis) % tensors[0].ndim
        parts: list[tuple[TracedGroup | None, int]] = []
        for x in tensors:
            tag = self.tag(x)
            if tag is not None and (not tag.is_plain or tag.position.axis != joint):
                return None
            group = None if tag is None else tag.group
            parts += group.parts if group and group.parts else [(group, x.shape[joint])]
        group = TracedGroup(sum(length for _, length in parts), [], parts=parts)
        self._all.append(group)
        return Tag(group, Position(joint), group.channels)

    def _layer(self, name: str, layer: Any, x: Tensor, output: Tensor) -> None:
        """A linear layer or a convolution: reads the channels of ``x``, and writes others."""
        tag, axis = self.tag(x), channel_axis(layer, output)
        if not isinstance(layer, Linear) and layer.groups > 1:
            if tag is not None:
                self._grouped(name, layer, tag, axis, output)
            return
        if tag is not None:
            if (tag.position.axis, tag.position.gates) == (axis, 1):
                source = self._end(name, False, tag.group)
                if source.readers.setdefault(name, tag.position.block) != tag.position.block:
                    source.reason = f"{name} is called with other channels, too"
            else:
                tag.group.reason = f"{name} does not read it on its axis of channels"
                tag.group.is_mixed = True
        unit = self._units.get(name, (1, 1))
        group = self._written(name, output.shape[axis] // prod(unit))
        group.is_rigid |= isinstance(layer, ConvTranspose)
        if name in self._units:
            group.units.setdefault(name, unit)
        gates, rows = group.units.get(name, unit)
        self._tags[id(output)] = output, Tag(group, Position(axis, rows, gates), group.channels)

    def _grouped(self, name: str, layer: Any, tag: Tag, axis: int, output: Tensor) -> None:
        """A convolution in groups, each of which becomes a channel or a part of one."""
        group, channels = tag.group, gcd(tag.channels, layer.groups)
        block = output.shape[axis] // channels
        is_fixed = group.is_rigid or bool(group.parts) or channels == 1
        is_alike = channels == tag.channels and (block == 1 or not group.parts)
        if tag.position.axis != axis or not tag.is_contiguous or (is_fixed and not is_alike):
            group.reason = f"{name} reads it in groups"
            return
        group.coarsen(channels)
        self._note_companion(group, name)
        self._tags[id(output)] = output, Tag(group, Position(axis, block), channels)

    def _written(self, name: str, channels: int) -> TracedGroup:
        """The group that a layer writes, of so many channels in its first call."""
        if (name, True) not in self._ends:
            self._ends[name, True] = TracedGroup(channels, [name])
            self._all.append(self._ends[name, True])
        return self._root(self._ends[name, True])

    def _recurrent_owner(self, inputs: list[Tensor]) -> tuple[str, nn.RNNBase] | None:
        """The recurrent layer whose parameters are among the inputs of a function."""
        owners = (self._owners[id(x)] for x in inputs if id(x) in self._owners)
        return next(((n, each) for n, each in owners if isinstance(each, nn.RNNBase)), None)

    def _recurrent(
        self, owner: tuple[str, nn.RNNBase], tags: list[Tag], outputs: tuple[Tensor, ...]
    ) -> None:
        """A recurrent layer: mixes the channels that it reads, and writes its hidden units."""
        name, layer = owner
        for tag in tags:
            tag.group.reason = tag.group.reason or f"{name} mixes its channels over time"
        group = self._written(name, layer.hidden_size)
        group.is_rigid = True
        if layer.bidirectional or layer.proj_size:
            group.reason = "it has two directions, or projects its hidden units"
        for x in outputs:
            self._tags[id(x)] = x, Tag(group, Position(x.ndim - 1), group.channels)

    def _companion(self, inputs: list[Tensor], source: Tensor, tag: Tag, function: str) -> None:
        """Note the module whose parameters or buffers a function applies to the channels."""
        for x in (x for x in inputs if id(x) in self._owners):
            name, module = self._owners[id(x)]
            if x.numel() == 1 < tag.channels:
                continue  # one slope or scale for all of them
            if isinstance(module, Norm | nn.PReLU) and tag.is_contiguous:
                self._note_companion(tag.group, name)
            elif not _is_applied_per_channel(x, source, tag.position.axis, function):
                continue
            elif tag.is_plain and is_per_channel(module, source.shape[tag.position.axis]):
                self._note_companion(tag.group, name)
            else:
                holder = name or "the module"
                tag.group.reason = f"{function} has parameters of {holder} per channel"

    def _note_companion(self, group: TracedGroup, name: str) -> None:
        """Note a module that has parameters per channel."""
        group = self._end(name, False, group)
        group.companions = [*dict.fromkeys([*group.companions, name])]

    def _locations(
        self, func: Any, args: Any, kwargs: Any, sources: list[Tensor], tags: Mapping[int, Tag]
    ) -> list[Position | None]:
        """Where the channels of the inputs lie in each output; None where they are mixed."""
        # A norm or a gain that begins at 0 hides for now what it lets through.
        args, kwargs = map_leaves(
            (args, kwargs), lambda x: x.masked_fill(x == 0, 1) if isinstance(x, nn.Parameter) else x
        )
        groups = [tags[id(x)].group for x in sources]
        channels = min(group.channels for group in groups)
        for group in groups if len(set(groups)) > 1 else ():
            factor, remainder = divmod(group.channels, channels)
            if remainder or group.parts or (factor > 1 and group.is_rigid):
                return [None]
        starts = [
            (x, tags[id(x)].position.coarse(tags[id(x)].channels // channels)) for x in sources
        ]
        indices = [i for i, each in enumerate(tensors((args, kwargs))) if id(each) in tags]
        # A model that caches calls other functions in its next pass.
        call = repr(map_leaves([func, args, kwargs], lambda x: x.shape))
        key = self._number, call, channels, *indices, *(position for _, position in starts)
        if key not in self._trials:
            self._trials[key] = positions(func, args, kwargs, starts, channels)
        locations = self._trials[key]
        group, (x, start) = groups[0], starts[0]
        gates, rows = self._units.get(group.writers[0], (1, 1)) if group.writers else (1, 0)
        # Only where the rows of the layer still lie as it wrote them.
        is_layout = len(sources) == 1 and start.block == rows and not group.is_rigid
        if None in locations and is_layout:
            group.options += units_behind(func, args, kwargs, x, start, channels, gates)
        return locations


def _is_applied_per_channel(parameter: Tensor, source: Tensor, axis: int, function: str) -> bool:
    """Whether a parameter that a function applies to an activation has an entry per channel."""
    if function not in _BROADCASTS:
        return parameter.numel() > 1
    offset = axis - source.ndim
    return parameter.ndim >= -offset and parameter.shape[offset] > 1
