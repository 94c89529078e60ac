"""Which layers of a module share channels, so that they can only be widened together.

A forward pass is recorded, function by function. A linear layer, a convolution or a recurrent layer
*writes* channels; whatever computes each channel from itself alone (activations, pooling, reshapes,
batch norms, convolutions in groups) passes them on; another such layer behind it *reads* them.
Functions of two activations tie their channels, and so does a layer that is called more than once;
in a concatenation each group keeps its place, or several, as in a flattened sequence. Where a
function mixes the channels of a layer, such as attention or a gated unit, larger *units* of its
rows are tried: heads, or pairs of a value and its gate. A function that mixes these too refuses the
group by its name, unless it may be one that sees no more of them than their mean or mean square,
such as a layer norm, or one that sums products with other channels, such as a dot product.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from esper.kasmina.channel_trace import Recorder, Trials
from esper.kasmina.layer_kinds import Table, is_of_user, layer_at
from esper.kasmina.nested import tensors as leaf_tensors
from esper.kasmina.traced_group import TracedGroup, Unit


@dataclass(frozen=True, slots=True, eq=False)
class ChannelGroup:
    """Channels that can be widened.

    Attributes:
        channels: their number.
        writers: names of the layers that compute them; those of a residual stream are several.
        companions: names of norms and convolutions in groups with parameters per channel.
        readers: by the name of each layer that reads them, how many of its inputs belong to one
            channel: several after a convolution that is flattened.
        units: by the name of a writer that has several rows per channel, of how many gates they
            are and how many lie side by side in each: 3 and D for queries, keys and values of heads
            of width D from one layer, 2 and 1 for a value and its gate.
        attends: whether there is a softmax of something in each channel.
        is_balanced: whether a norm sees all channels, so that new ones begin as copies of those
            that are there, a whole multiple of them; else they are random, see ``new_units``.
        heads: those of attention that is as wide as the channels, and becomes wider with them.
        silent: norms, tables or other layers whose new entries are 0, as what reads them is a table
            that also writes the channels, such as that of an embedding and the head of a language
            model, or as products with them are summed.
        silence: that 0; -1 of norms that multiply by one more than their weight, as Gemma's do.
        axes: of each weight that is a parameter of a user's module, see ``user_weights``.
        layouts: by the name of a companion or reader behind a concatenation, its parts in order: a
            layer that writes the part, or an empty name and the length of one that stays. Several
            parts may be of the group.
    """

    channels: int
    writers: tuple[str, ...]
    companions: tuple[str, ...]
    readers: Mapping[str, int]
    layouts: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    units: Mapping[str, Unit] = field(default_factory=dict)
    attends: bool = False
    is_balanced: bool = False
    heads: tuple["ChannelGroup", ...] = ()
    silent: tuple[str, ...] = ()
    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    silence: float = 0.0

    @property
    def name(self) -> str:
        """The names of the writers."""
        return " + ".join(self.writers)

    @property
    def title(self) -> str:
        """The name, of many writers shorter."""
        first, *more = self.writers
        return self.name if len(more) < 3 else f"{first} + {len(more)} more"

    @property
    def width(self) -> int:
        """Channels, each counted as often as the widest of its writers has rows side by side."""
        return self.channels * max((rows for _, rows in self.units.values()), default=1)

    def new_count(self, share: float) -> int:
        """How many new channels are so many times those that are there."""
        count = max(1, round(share)) if self.is_balanced else share
        return round(count * self.channels)

    def parts(self, count: int) -> list[tuple["ChannelGroup", int]]:
        """The group with so many new channels, and its heads with as many for each channel."""
        heads = [(each, count * each.channels // self.channels) for each in self.heads]
        return [(self, count), *heads]

    def half(self, count: int) -> int:
        """At most half as many new channels."""
        unit = self.channels if self.is_balanced else 1
        return count // 2 // unit * unit

    def change(self, count: int) -> str:
        """So many more, as a user counts them: heads, or single channels."""
        if self.units and self.attends:
            return f"{self.channels} -> {self.channels + count} heads"
        rows = self.width // self.channels
        text = f"{self.width} -> {self.width + rows * count} channels"
        return " and ".join([text, *dict.fromkeys(h.change(n) for h, n in self.parts(count)[1:])])

    def has_places(self, layer: str) -> bool:
        """Whether these are but some of the channels of a companion, see ``layouts``."""
        return layer in self.layouts and layer not in self.writers

    def rows(self, layer: str, size: int, channels: int) -> int:
        """How many of ``size`` entries of a writer or companion belong to one of the channels."""
        parts = self.layouts[layer] if self.has_places(layer) else ()
        return sum(writer in self.writers for writer, _ in parts) or size // channels


MOST_PASSES, MOST_BALANCED = 12, 512
"""Forward passes that try units of rows, and channels that may become more behind a norm of them:
trying it makes the module several times as large."""


def channel_groups(
    model: nn.Module, run: Callable[[], Any]
) -> tuple[list[ChannelGroup], dict[str, str]]:
    """The groups of channels of a module.

    Args:
        model: the module, in evaluation mode.
        run: runs a forward pass without gradients.

    Returns:
        - The groups that can be widened, in the order of their first writer, and those that perhaps
          can, with copies.
        - By name of a group that cannot, or perhaps, why not. Outputs of the module are not listed.
    """
    units, first, trials = dict[str, Unit](), dict[str, Unit](), Trials()
    queues, attempts = dict[str, list[Unit]](), defaultdict[str, set[Unit]](set)
    groups = _pass(model, run, units, trials)
    for _ in range(MOST_PASSES):
        before = dict(units)
        for name, new in ((w, g.options) for g in groups if g.is_mixed for w in g.writers):
            queue = [unit for unit in new if unit not in attempts[name]] + queues.get(name, [])
            attempts[name].update(new)
            if queue:
                units[name] = queue.pop(0)
                first.setdefault(name, units[name])
            queues[name] = queue
        if units == before:
            break
        groups = _pass(model, run, units, trials)
    failures = {name for group in groups if group.is_mixed for name in group.writers}
    if failures & units.keys():
        units = {name: unit for name, unit in units.items() if name not in failures}
        groups = _pass(model, run, units, trials)
    mixtures = [group for group in groups if group.is_mixed]
    mixable = {name for group in mixtures for name in group.writers}
    candidates = defaultdict[str, list[TracedGroup]](list)
    # Perhaps a norm alone mixes what scales and shifts it, whose first units are right.
    passes = [(units, False), (units, True), ({**first, **units}, False)]
    for each, contracts in passes[: 2 + (first.keys() > units.keys())]:
        known = (g.writers[0] in candidates and not (g.products or g.silent) for g in mixtures)
        if each is units and all(known):
            continue
        for group in _pass(model, run, each, trials, mixable, contracts):
            is_fit = group.channels <= MOST_BALANCED if group.is_balanced else each is units
            names = group.writers if each is units else group.writers[:1]
            is_new = not group.reason and mixable.issuperset(names)
            if is_new and is_fit and group.contracts >= contracts:
                candidates[group.writers[0]].append(group)
    wide, reasons = list[ChannelGroup](), dict[str, str]()
    for group in groups:
        if group.reason:
            reasons[_frozen(group).name] = group.reason
        wide += map(_frozen, candidates[group.writers[0]] if group.reason else [group])
    return wide, reasons


def _frozen(group: TracedGroup) -> ChannelGroup:
    heads = (
        ChannelGroup(count, (name,), (), {f"{name}.out_proj": rows}, {}, {name: (1, rows)}, True)
        for name, (count, rows) in group.heads.items()
    )
    return ChannelGroup(
        group.channels, tuple(group.writers), tuple(group.companions), group.readers, group.layouts,
        group.units, group.attends, group.is_balanced, tuple(heads),
        tuple(dict.fromkeys(group.silent)), group.axes,
    )  # fmt: skip


def _pass(
    model: nn.Module,
    run: Callable[[], Any],
    units: Mapping[str, Unit],
    trials: Trials,
    mixable: Collection[str] = (),
    contracts: bool = False,
) -> list[TracedGroup]:
    """The groups of a forward pass that are no outputs, see ``Recorder``."""
    recorder = Recorder(model, units, trials, mixable, contracts)
    with recorder:
        output = run()
    for leaf in leaf_tensors(output):
        if (tag := recorder.tag(leaf)) is not None:
            tag.group.is_output = True
    recorder.resolve_concatenations()
    groups = [group for group in recorder.groups() if not group.is_output]
    for group in groups:
        names = dict.fromkeys((*group.writers, *group.readers, *group.companions))
        layers = {name: layer_at(model, name) for name in names}
        group.axes = recorder.axes
        tensors = [(module, *each) for module, entries in layers.values() for each in entries]
        biases = {f"{name}.bias" for name in group.readers if name not in group.writers}
        weights = [x for _, n, _, x in tensors if isinstance(x, nn.Parameter) and n not in biases]
        for module, name, key, _ in tensors:
            if key in module._non_persistent_buffers_set:
                group.reason = group.reason or f"the buffer {name} is not persistent"
        users = (layers[name] for name in group.companions if is_of_user(layers[name][0]))
        fixed = {id(x) for _, entries in users for *_, x in entries}  # such as sines of positions
        if not all(p.requires_grad or id(p) in fixed for p in weights):
            group.reason = group.reason or "a layer is frozen"
        tables = {id(x) for m, *_, x in tensors if isinstance(m, Table)}
        holders = Counter(id(p) for p in weights)
        if any(recorder.uses[x] > (n if x in tables else 1) for x, n in holders.items()):
            group.reason = group.reason or "a layer shares its parameters with another module"
        for factors in group.products if group.contracts else ():
            if not any({*group.silent} >= {*writers} for writers, _ in factors):
                group.silent += factors[0][group.is_balanced]
        if {*group.writers} <= {*group.silent}:
            group.reason = group.reason or "the same layers write both factors of a product"
        if not (group.readers or group.contracts or group.silent):
            group.reason = group.reason or "no layer reads it"
    return groups
