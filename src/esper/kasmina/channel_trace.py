"""A forward pass, followed function by function: whose channels lie where in each tensor."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from esper.kasmina.channel_probe import NO_AXIS, Position, positions, units_behind
from esper.kasmina.layer_kinds import (
    PREFIX,
    SIZES,
    Convolution,
    ConvTranspose,
    InputsFirst,
    Norm,
    Recurrent,
    Table,
    channel_axis,
    has_weight_norm,
    is_of_user,
    is_per_channel,
    last_axis,
    reading_names,
    tensors_of,
)
from esper.kasmina.nested import map_leaves, tensors
from esper.kasmina.traced_group import Tag, TracedGroup, Unit

if TYPE_CHECKING:
    from esper.kasmina.user_weights import UserWeight

_LAYERS = {
    "linear",
    "addmm",
    *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
}
_MATMULS = {"matmul", "__matmul__", "mm"}
_LOOKUPS = {"embedding", "embedding_bag"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_RECURRENT |= {f"{name}_cell" for name in _RECURRENT}
_BROADCASTS = {"add", "__add__", "__radd__", "__iadd__", "add_", "mul", "__mul__", "__rmul__"}
_BROADCASTS |= {"__imul__", "mul_", "layer_norm", "rms_norm", "masked_fill", "where"}
_BROADCASTS |= {"scaled_dot_product_attention"}
"""Functions that lay a parameter along the last axes of an activation."""
_PRODUCTS = {"mul", "__mul__", "__rmul__", "__imul__", "mul_"}
_SOFTMAX = {"softmax", "scaled_dot_product_attention"}
_CONCATENATIONS = {"cat", "concat", "concatenate"}

Trials = dict[tuple[Any, ...], list[Position | None]]
"""By a function's call and its number, and by where the channels lie in its inputs: where in its
outputs."""


class Recorder(TorchFunctionMode):
    """Follows the channels of every layer through the functions of a forward pass.

    Args:
        model: the module.
        units: by layer, what of its rows counts as a channel.
        trials: filled by the pass.
        mixable: layers whose channels a function may mix, if all of a group are among them.
        contracts: whether a function may also sum products of their channels.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, Unit],
        trials: Trials,
        mixable: Collection[str] = (),
        contracts: bool = False,
    ):
        super().__init__()
        self._mixable, self._contracts = set(mixable), contracts
        self._model, self._units, self._trials, self._number = model, units, trials, 0
        self._weights = list[Tensor]()
        self._ends: dict[tuple[str, bool], TracedGroup] = {}
        self._tags: dict[int, tuple[Tensor, Tag]] = {}
        self._parents: dict[TracedGroup, TracedGroup] = {}
        self._all: list[TracedGroup] = []
        # Of a table that a linear layer shares, that layer.
        modules = sorted(model.named_modules(), key=lambda each: not _is_table(each[1]))
        self._tables: dict[int, dict[str, nn.Module]] = {}
        for name, module in modules:
            if _is_table(module):
                self._tables.setdefault(id(module._parameters["weight"]), {})[name] = module
        self.axes, self._weight_owners = dict[str, tuple[int, int]](), set[str]()
        self._has_weights = any(is_of_user(each) and [*tensors_of(each)] for _, each in modules)
        self._transposes = dict[int, tuple[str, nn.Module, tuple[str, ...]]]()
        self._owners: dict[int, tuple[str, nn.Module, tuple[str, ...]]] = {
            id(x): (name, module, (key,))
            for name, module in modules
            for key, x in {**module._parameters, **module._buffers}.items()
            if x is not None and x.is_floating_point()  # others count or say where
        }
        self.uses = Counter(
            id(p) for module in model.modules() for p in module._parameters.values()
        )

    def groups(self) -> list[TracedGroup]:
        """The groups that were not joined to another."""
        return [each for each in self._all if each not in self._parents and each.writers]

    def resolve_concatenations(self) -> None:
        """Give what a concatenation passes through and what reads it to the groups in it."""
        for each in self._all:
            parts = self._parts(each)
            layout = tuple(
                (g.writers[0], 0) if g and g.writers and not g.units else ("", n) for g, n in parts
            )
            for group in dict.fromkeys(group for group, _ in parts if group is not None):
                group.reason = group.reason or each.reason
                group.is_mixed |= each.is_mixed
                if group.units:
                    group.reason = group.reason or "units of several rows are concatenated"
                group.is_output |= each.is_output
                group.readers |= each.readers
                group.companions += each.companions
                group.layouts |= dict.fromkeys((*each.companions, *each.readers), layout)

    def _parts(self, group: TracedGroup) -> list[tuple[TracedGroup | None, int]]:
        """Those of a concatenation, joined to others since."""
        return [(None if g is None else self._root(g), length) for g, length in group.parts]

    def _root(self, group: TracedGroup) -> TracedGroup:
        """The group, or the one that it was joined to."""
        while group in self._parents:
            group = self._parents[group]
        return group

    def _union(self, groups: Collection[TracedGroup]) -> TracedGroup:
        """One group of several."""
        first, *rest = sorted({self._root(group) for group in groups}, key=self._all.index)
        for group in rest:
            self._tie(first, group)
        return first

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
        if first.parts and self._parts(first) == self._parts(second):
            return group
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
        if (name in _LAYERS or name in _MATMULS) and (reading := self._reading(name, args, kwargs)):
            output = func(*args, **kwargs)
            self._layer(*reading, output)
            return output
        if self._has_weights and (weight := self._user_weight(name, args, kwargs)):
            output = func(*args, **kwargs)
            self._multiply(weight, output)
            return output
        if name in _LOOKUPS and (table := self._tables.get(id(inputs[1]))):
            output = func(*args, **kwargs)
            for each, module in table.items():
                self._write(each, module, output, output.ndim - 1)
            self._union({self._of_writer(each, 0) for each in table})
            return output
        if name == "multi_head_attention_forward":
            output = func(*args, **kwargs)
            self._attention(inputs, args[:3], output[0])
            return output
        if name == "_weight_norm":
            return self._weight_of_norm(inputs, func(*args, **kwargs))
        if name in _RECURRENT and (cell := self._owner(Recurrent, inputs)):
            outputs = func(*args, **kwargs)
            self._recurrent(*cell, inputs, tags, outputs)
            return outputs
        if len(tags) == 0:
            return self._of_parameters(name, inputs, func(*args, **kwargs))
        if name in _CONCATENATIONS and (concatenation := self._concatenation(*args, **kwargs)):
            output = func(*args, **kwargs)
            self._tags[id(output)] = output, concatenation
            return output
        if any(id(x) in self._owners for x in inputs):
            tags = {key: self._side_by_side(tag) for key, tag in tags.items()}
        # Before the function, which may work in place.
        sources = self._wide(name, inputs, tags)
        locations = self._locations(func, args, kwargs, sources, tags)
        groups = {tag.group for tag in tags.values()}
        if None in locations and len(groups) > 1:
            # Perhaps the others belong to another axis, as slots of attention do.
            *_, second, widest = sorted(groups, key=lambda each: each.channels)
            alone = [x for x in sources if tags[id(x)].group is widest]
            if second.channels < widest.channels and None not in (
                further := self._locations(func, args, kwargs, alone, tags)
            ):
                for group in groups - {widest}:
                    group.refuse(f"{name} mixes its channels")
                sources, locations, groups = alone, further, {widest}
        output = func(*args, **kwargs)
        outputs = list(tensors(output))
        if not outputs or not locations:
            return output  # its shape, another number, or zeros of its shape
        is_mixed = len(locations) != len(outputs) or None in locations
        if is_mixed and self._contracts and self._contract(groups):
            return output
        if is_mixed and len(groups) == 1 and self._may_mix(*groups):
            # Of a mean, a variance and the like nothing but the layer's own shape is followed.
            starts = {x.shape: tags[id(x)].position for x in sources}
            locations = [starts.get(y.shape) for y in outputs]
        elif is_mixed:
            verb = "mixes its channels"
            if name in _LAYERS:
                verb = "reads it with a weight of no known layer"
            for group in groups:
                group.refuse(f"{name} {verb}")
            return output
        for x in sources:
            self._companion(inputs, x, tags[id(x)], name)
        first = self._product(groups) if name in _PRODUCTS else self._union(groups)
        first.attends |= name in _SOFTMAX
        for x, position in zip(outputs, locations, strict=True):
            if position is not None and position.axis != NO_AXIS:
                self._tags[id(x)] = x, Tag(first, position, first.channels)
        return output

    def _reading(self, name: str, args: Any, kwargs: Any) -> tuple[str, Any, Tensor] | None:
        """The layer by whose weight a function multiplies what it reads."""
        begin, keys = (1, ("mat1", "mat2")) if name == "addmm" else (0, ("input", "weight"))
        operands = dict(zip(keys, args[begin:], strict=False)) | kwargs
        owners = self._transposes if name in _MATMULS else self._owners
        owner, layer, _ = owners.get(id(operands.get(keys[1])), ("", None, ()))
        is_layer = isinstance(layer, InputsFirst if begin else nn.Linear | Convolution | Table)
        return (owner, layer, operands[keys[0]]) if is_layer else None

    def _user_weight(self, name: str, args: Any, kwargs: Any) -> "UserWeight | None":
        """The weight of a user's module by which a function multiplies channels, or an input."""
        from esper.kasmina.user_weights import user_weight  # most modules have none

        weight = user_weight(name, args, kwargs, self._owners)
        if weight is None or (tag := self.tag(x := weight.product.input)) is None:
            return weight
        return weight if tag.position.axis == x.ndim + weight.product.reads else None

    def _multiply(self, weight: "UserWeight", output: Tensor) -> None:
        """A weight of a user's module: reads the channels of its input, and writes others."""
        if (tag := self.tag(weight.product.input)) is not None:
            for name in weight.names:
                self._read(name, tag, tag.position.axis)
        for name in (*weight.names, *weight.biases):
            self._write(name, weight.module, output, output.ndim + weight.product.writes)
        self._union({self._of_writer(name, 0) for name in (*weight.names, *weight.biases)})
        self.axes |= dict(zip(weight.names, weight.axes, strict=True))
        self._weight_owners.add(weight.names[0].rpartition(".")[0])

    def _wide(self, name: str, inputs: list[Tensor], tags: dict[int, Tag]) -> list[Tensor]:
        """The inputs that have channels, but for the gates of all channels of another."""
        sources = [x for x in inputs if id(x) in tags]
        wide = [x for x in sources if x.shape[tags[id(x)].position.axis] > 1]
        for gate in {id(x) for x in sources} - {id(x) for x in wide} if wide else ():
            group = tags.pop(gate).group
            group.reason = group.reason or f"{name} lays its only channel along others"
        return wide or sources

    def _may_mix(self, group: TracedGroup) -> bool:
        """Whether a function may mix the channels of a group; it is noted that one does."""
        first, *more = {each for each, _ in self._parts(group)} or {group}
        if first is None or more:
            return False
        first.is_balanced |= self._mixable.issuperset(first.writers)
        return first.is_balanced

    def _contract(self, groups: set[TracedGroup]) -> bool:
        """Whether a function may sum products of channels; those of all factors are one then."""
        has_products = len(groups) > 1 or any(each.products or each.silent for each in groups)
        if is_contraction := has_products and len({each.channels for each in groups}) == 1:
            self._product(groups).contracts = True
        return is_contraction

    def _product(self, groups: Collection[TracedGroup]) -> TracedGroup:
        """One group of the factors of a product."""
        first, *more = sorted(groups, key=self._all.index)
        factors = [(each.writers[:], each.companions[-1:]) for each in (first, *more)]
        group = self._union(groups)
        group.products += [factors] if more else []
        return group

    def _of_parameters(self, name: str, inputs: list[Tensor], output: Any) -> Any:
        """What is computed of parameters alone counts as a parameter, as in ``weight[:, None]``.

        Parameters that meet a single feature write channels: those of its token.
        """
        owners = [self._owners[id(x)] for x in inputs if id(x) in self._owners]
        modules = dict(owner[:2] for owner in owners)
        is_layer = any(isinstance(module, tuple(SIZES)) for module in modules.values())
        is_matrix = isinstance(output, Tensor) and output.ndim == 2
        if is_layer and is_matrix and output.mT.is_set_to(inputs[0]):
            self._transposes[id(output)] = owners[0]
            self._weights.append(output)
        if not isinstance(output, Tensor) or len(modules) != 1 or is_layer:
            return output
        lengths = [x.shape[-1:] for x in inputs if id(x) not in self._owners]
        is_learned = any(key in module._parameters for _, module, keys in owners for key in keys)
        if is_learned and name in _BROADCASTS and (1,) in lengths and output.shape[-1] > 1:
            group = TracedGroup(output.shape[-1], [])
            self._all.append(group)
            self._tags[id(output)] = output, Tag(group, Position(output.ndim - 1), group.channels)
            self._companion(inputs, output, self._tags[id(output)][1], name)
            return output
        keys = dict.fromkeys(key for owner in owners for key in owner[2])
        self._owners[id(output)] = *owners[0][:2], tuple(keys)
        self._weights.append(output)
        return output

    def _weight_of_norm(self, inputs: list[Tensor], weight: Tensor) -> Tensor:
        """A weight that a weight norm computes: it counts as a parameter of its layer."""
        name = self._owners.get(id(inputs[0]), ("",))[0].removesuffix(f".{PREFIX[:-1]}")
        layer = self._model.get_submodule(name)
        if has_weight_norm(layer):
            self._owners[id(weight)] = name, layer, ()
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
            tag = tag and self._side_by_side(tag)
            if tag is not None and (not tag.is_plain or tag.position.axis != joint):
                return None
            group = None if tag is None else tag.group
            parts += group.parts if group and group.parts else [(group, x.shape[joint])]
        return self._compound(parts, Position(joint))

    def _compound(self, parts: list[tuple[TracedGroup | None, int]], position: Position) -> Tag:
        """A group whose channels are those of several, and where they lie."""
        group = TracedGroup(sum(length for _, length in parts), [], parts=parts)
        self._all.append(group)
        return Tag(group, position, group.channels)

    def _side_by_side(self, tag: Tag) -> Tag:
        """Channels that lie there several times, as those of as many groups."""
        group, position = tag.group, tag.position
        if position.gates == 1 or group.units:
            return tag
        parts = (group.parts or [(group, group.channels)]) * position.gates
        return self._compound(parts, replace(position, gates=1))

    def _layer(self, name: str, layer: Any, x: Tensor, output: Tensor) -> None:
        """A linear layer or a convolution: reads the channels of ``x``, and writes others."""
        tag, axis, is_table = self.tag(x), channel_axis(layer, output), _is_table(layer)
        if getattr(layer, "groups", 1) > 1:
            if tag is not None:
                self._grouped(name, layer, tag, axis, output)
            return
        if tag is not None and tag.position.axis != axis and self._passes_on(layer, tag, x, output):
            self._tags[id(output)] = output, tag
            return
        if tag is not None:
            self._read(name, tag, axis, self._tables.get(id(layer._parameters.get("weight")), {}))
        if not is_table:
            self._write(name, layer, output, axis)

    def _passes_on(self, layer: Any, tag: Tag, x: Tensor, output: Tensor) -> bool:
        """Whether a layer of another axis, such as that of tokens, computes each channel alone."""
        is_alone = {*getattr(layer, "kernel_size", ())} <= {1}
        is_alone &= x.shape[tag.position.axis] == output.shape[tag.position.axis]
        return is_alone and self._mixable.issuperset(tag.group.writers)

    def _read(self, name: str, tag: Tag, axis: int, tables: Collection[str] = ()) -> None:
        """A layer that reads channels; tables of the same weight write them."""
        tag = self._side_by_side(tag)
        if (tag.position.axis, tag.position.gates) != (axis, 1):
            tag.group.refuse(f"{name} does not read it on its axis of channels")
            return
        source = self._end(name, False, tag.group)
        source.silent += (source.companions[-1:] or [*tables]) if tables else []
        for each in tables:
            self._of_writer(each, source.channels)
            source = self._end(each, True, source)
        block = tag.position.block
        if name not in tables and source.readers.setdefault(name, block) != block:
            source.reason = f"{name} is called with other channels, too"

    def _write(self, name: str, layer: nn.Module, output: Tensor, axis: int) -> None:
        """A layer that writes channels."""
        unit = self._units.get(name, (1, 1))
        # Heads that meet a layer of one row for each, as those that talk, are its single rows.
        unit = (1, 1) if output.shape[axis] % prod(unit) else unit
        group = self._of_writer(name, output.shape[axis] // prod(unit))
        group.is_rigid |= isinstance(layer, ConvTranspose)
        if getattr(layer, "max_norm", None) is not None:
            group.reason = f"{name} has a largest norm"
        if unit != (1, 1):
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

    def _of_writer(self, name: str, channels: int) -> TracedGroup:
        """The group that a layer writes, of so many channels in its first call."""
        if (name, True) not in self._ends:
            self._ends[name, True] = TracedGroup(channels, [name])
            self._all.append(self._ends[name, True])
        return self._root(self._ends[name, True])

    def _owner(self, kind: Any, inputs: list[Tensor]) -> tuple[str, Any] | None:
        """The layer of this kind whose parameters are among the inputs of a function."""
        owners = (self._owners[id(x)] for x in inputs if id(x) in self._owners)
        return next(((name, layer) for name, layer, _ in owners if isinstance(layer, kind)), None)

    def _attention(self, inputs: list[Tensor], sources: Sequence[Tensor], output: Tensor) -> None:
        """``nn.MultiheadAttention``: its heads are as wide together as what it reads and writes."""
        name, layer = self._owner(nn.MultiheadAttention, inputs) or ("", None)
        is_known = layer is not None and layer.in_proj_weight is not None and layer.bias_k is None
        position, groups, queries = Position(output.ndim - 1), set[TracedGroup](), list[str]()
        for x in sources:
            if (tag := self.tag(x)) is not None:
                groups.add(tag.group)
                is_known &= tag.position == position and not tag.group.parts
            else:
                names = self._names_per_channel(x, output.shape[-1])
                is_known &= bool(names)
                queries += names
        if layer is not None:
            group = self._of_writer(f"{name}.out_proj", layer.embed_dim)
            self._tags[id(output)] = output, Tag(group, position, layer.embed_dim)
            groups.add(group)
        if layer is not None and is_known:
            group = self._union(groups)
            group.readers[name], group.heads[name] = 1, (layer.num_heads, layer.head_dim)
            for query in queries:
                self._note_companion(group, query)
            groups = {group}
        for group in groups:
            if not is_known or not self._may_mix(group):
                group.refuse(f"{name or 'attention'} mixes its channels")

    def _recurrent(
        self, name: str, layer: Any, inputs: Sequence[Tensor], tags: Mapping[int, Tag], outputs: Any
    ) -> None:
        """A recurrent layer: reads its input, and begins with hidden units as those it writes."""
        group, states = self._of_writer(name, layer.hidden_size), list[TracedGroup]()
        for x, tag in ((x, tags[id(x)]) for x in inputs if id(x) in tags):
            if x is inputs[0] and reading_names(layer)[0] in layer._parameters:
                self._read(name, tag, x.ndim - 1)
            elif x is not inputs[0] and tag.is_plain and tag.position.axis == x.ndim - 1:
                states.append(tag.group)
            else:
                tag.group.reason = tag.group.reason or f"{name} mixes its channels over time"
        group = self._union([group, *states])
        group.is_rigid = True
        if getattr(layer, "proj_size", 0):
            group.reason = "it projects its hidden units"
        for x in tensors(outputs):
            gates = max(1, x.shape[-1] // layer.hidden_size)  # two directions side by side
            self._tags[id(x)] = x, Tag(group, Position(x.ndim - 1, 1, gates), group.channels)

    def _companion(self, inputs: list[Tensor], source: Tensor, tag: Tag, function: str) -> None:
        """Note the module whose parameters or buffers a function applies to the channels."""
        entries = tag.channels * tag.position.block
        for x in (x for x in inputs if id(x) in self._owners):
            name, module, _ = self._owners[id(x)]
            if x.numel() == 1 < tag.channels:
                continue  # one slope or scale for all of them
            if isinstance(module, Norm | nn.PReLU) and tag.is_contiguous:
                self._note_companion(tag.group, name)
            elif not _is_applied_per_channel(x, source, tag.position.axis, function):
                continue
            elif tag.is_contiguous and (names := self._names_per_channel(x, entries)):
                for each in names:
                    self._note_companion(tag.group, each)
            elif function in _BROADCASTS or not is_of_user(module):  # others are tried
                holder = name or "the module"
                tag.group.reason = f"{function} has parameters of {holder} per channel"

    def _names_per_channel(self, x: Tensor, channels: int) -> list[str]:
        """The module of a parameter, or the full names of the user's parameters of which it is
        made, if all of these have an entry per channel on their ``last_axis``, or a single one."""
        name, module, keys = self._owners.get(id(x), ("", self._model, ()))
        if keys and name not in self._weight_owners and is_per_channel(module, channels):
            return [name]
        shapes = {key: each.shape for key, each in tensors_of(module) if each.numel() > 1}
        lengths = {key: shape[last_axis(shape)] for key, shape in shapes.items()}
        if not is_of_user(module) or any(lengths.get(key, channels) != channels for key in keys):
            return []
        return [f"{name}.{key}".lstrip(".") for key in keys if key in lengths]

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


def _is_table(module: nn.Module) -> bool:
    """Whether it is an embedding, whose weight is not parametrized."""
    return isinstance(module, Table) and "weight" in module._parameters


def _is_applied_per_channel(parameter: Tensor, source: Tensor, axis: int, function: str) -> bool:
    """Whether a parameter that a function applies to an activation has an entry per channel."""
    if function not in _BROADCASTS:
        return parameter.numel() > 1
    offset = axis - source.ndim
    return parameter.ndim >= -offset and parameter.shape[offset] > 1
