"""Widening of a group of channels, in place: the layers stay what they are, with larger sizes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.attention_heads import head_attributes, head_counts
from esper.kasmina.layer_kinds import (
    Recurrent,
    gates_of,
    group_counts,
    holder_of,
    is_bare_norm,
    is_of_user,
    layer_at,
    numbers_of,
    reading_names,
    reads_itself,
    rows_first,
    set_size,
    sides_of,
    size_names,
    size_of,
)
from esper.kasmina.nested import leaves
from esper.kasmina.new_channels import NewChannels, channel_count, ends_of

if TYPE_CHECKING:
    from esper.kasmina.channel_groups import ChannelGroup


@dataclass
class Widening:
    """A widening that was applied, and can be taken back.

    Attributes:
        exchanges: module, name of its parameter or buffer, the tensor before and the one after.
        sizes: module, attribute and its value before.
        optimizers: those that were told.
        states: by replaced parameter, the optimizer that had a state of it, and that state.
        ends: by module and name of its parameter, the rows and columns before the new ones.
        axes: by the same, those of rows and columns, if it is of a user's module.
    """

    exchanges: list[tuple[nn.Module, str, Tensor, Tensor]] = field(default_factory=list)
    sizes: list[tuple[nn.Module, str, int]] = field(default_factory=list)
    optimizers: tuple[Optimizer, ...] = ()
    states: dict[Tensor, tuple[Optimizer, Any]] = field(default_factory=dict)
    ends: dict[tuple[nn.Module, str], Sequence[list[int]]] = field(default_factory=dict)
    axes: dict[tuple[nn.Module, str], tuple[int, int] | None] = field(default_factory=dict)

    def undo(self) -> None:
        """Put back the parameters, their sizes and their state in the optimizer."""
        for module, name, before, _ in self.exchanges:
            put(module, name, before)
        for module, name, size in reversed(self.sizes):
            set_size(module, name, size)
        later = {id(after): before for _, _, before, after in self.exchanges}
        for optimizer in self.optimizers:
            exchange(optimizer, later)
            for _, _, _, after in self.exchanges:
                optimizer.state.pop(after, None)
        for before, (optimizer, state) in self.states.items():
            optimizer.state[before] = state


def widen(
    model: nn.Module, group: "ChannelGroup", new: NewChannels, *optimizers: Optimizer
) -> Widening:
    """Add channels to a group; the output of the module stays the same.

    The layers that read the group get weights of 0 for its new channels. State of the optimizer is
    kept for what was there, and starts at 0 for new entries; where it is a mean of squares, at
    ``FRESH`` of the mean over the old ones.

    Args:
        model: the module.
        group: one of its groups, see ``channel_groups``.
        new: what the new channels start with.
        optimizers: train the module; the parameters are exchanged in their groups.
    """
    change, gates = Widening(optimizers=optimizers), dict[nn.Module, int]()
    parts = [each for each, _ in group.parts(new.count)]
    try:
        for each, channels in zip(parts, (new, *new.heads), strict=True):
            _lengthen(model, each, channels, change, gates)
        _resize_users(model, change)
    except Exception:
        change.undo()  # nobody else knows what was exchanged so far
        raise
    for optimizer in optimizers:
        exchange(optimizer, {id(before): after for _, _, before, after in change.exchanges})
        for module, key, before, after in change.exchanges:
            if before in optimizer.state:
                change.states[before] = optimizer, optimizer.state.pop(before)
                state = _padded_state(
                    change.states[before][1], before, after, gates.get(module, 1),
                    change.ends[module, key],
                    partial(rows_first, module, like=before, axes=change.axes[module, key]),
                )  # fmt: skip
                if state is not None:
                    optimizer.state[after] = state
    return change


def _lengthen(
    model: nn.Module, group: "ChannelGroup", new: NewChannels, change: Widening,
    gates: dict[nn.Module, int],
) -> None:  # fmt: skip
    """Exchange the parameters of a group, and note in which of the layers rows are in gates."""
    ends = {name: ends_of(model, group, name) for name in (*group.companions, *group.readers)}
    channels = channel_count(model, group)
    ratio = 1 + Fraction(new.count, channels)
    ratios = dict.fromkeys(group.writers, ratio), dict.fromkeys(group.readers, ratio)
    for module, key, size in list(head_counts(model, *ratios)):
        _add(change, module, key, size - getattr(module, key))
    for name in (*group.writers, *group.companions):
        (module, tensors), is_writer = layer_at(model, name), name in group.writers
        for full, key, x in tensors:
            entry = new.entries.get(full)
            if entry is not None and not _put_shared(change, module, key, x):
                axes = group.axes.get(full)
                old = rows_first(module, x.detach(), axes=axes)
                positions = ends[name] if group.has_places(name) else [len(old)]
                gates[module] = group.units.get(name, (1, 1))[0] * gates_of(module)
                value, several = old, entry.to(x).unbind(1) if len(positions) > 1 else [entry.to(x)]
                for end, each in zip(reversed(positions), reversed(several), strict=True):
                    value = _longer(module, key, value, each, end, gates[module])
                _replace(change, module, key, rows_first(module, value, x, axes, back=True))
                sides = sides_of(module, key)
                columns = [n * (i + 1) // sides for n in old.shape[1:2] for i in range(sides)]
                change.ends[module, key], change.axes[module, key] = (positions, columns), axes
        join_weights(module)
        sizes = {*size_names(module)[: 1 if is_writer else None], *group_counts(module)}
        for attribute in sizes:
            size = size_of(module, attribute)
            _add(change, module, attribute, group.rows(name, size, channels) * new.count)
    for name, block in group.readers.items():
        module, tensors = layer_at(model, name)
        positions, axes = [block * end for end in ends[name]], group.axes.get(name)
        for attribute in size_names(module)[1:]:
            _add(change, module, attribute, len(positions) * block * new.count)
        for key in reading_names(module) if axes is None else [tensors[0][1]]:
            x = tensors[0][2] if axes is not None else module.get_parameter(key)
            if _put_shared(change, module, key, x):
                continue
            weight = rows_first(module, x, axes=axes)
            rows = change.ends.get((module, key), [[len(weight)]])[0]
            for end in reversed(positions):
                entry = new.weights(name, weight, block * new.count)
                weight = _insert(weight, entry, end, axis=1)
            _replace(change, module, key, rows_first(module, weight, axes=axes, back=True))
            change.ends[module, key], change.axes[module, key] = (rows, positions), axes
        join_weights(module)


def _resize_users(model: nn.Module, change: Widening) -> None:
    """Change attributes that hold sizes of tensors, or of those behind a norm without any."""
    if any(numbers_of(x) if is_of_user(x) else is_bare_norm(x) for x in model.modules()):
        from esper.kasmina.user_weights import later_numbers  # most modules have none

        before = {id(after): x.shape for _, _, x, after in change.exchanges}
        for module, key, size in list(later_numbers(model, before)):
            _add(change, module, key, size - size_of(module, key))


def _put_shared(change: Widening, module: nn.Module, key: str, x: Tensor) -> bool:
    """Give a layer the longer parameter that one which shares it has got; whether there is one."""
    after = next((after for *_, before, after in change.exchanges if before is x), None)
    if after is not None:
        put(module, key, after)
        change.exchanges.append((module, key, x, after))
    return after is not None


def _insert(x: Tensor, new: Tensor, end: int, axis: int = 0) -> Tensor:
    """A tensor with new entries of an axis behind its first ``end`` ones."""
    size = x.shape[axis]
    return torch.cat([x.narrow(axis, 0, end), new, x.narrow(axis, end, size - end)], axis)


FRESH = 0.01
"""Share of the mean over the other entries at which squared gradients of a new one start.

At the whole mean, Adam moves new entries so slowly that a network widened in the middle of training
does not reach one that was wide from the start; at 0 their first steps are several times as long as
the learning rate, which costs as much where that is high (``benchmarks/widening.py``).
"""


def parameter_count(model: nn.Module) -> int:
    """Parameters of ``model``, frozen ones included and shared ones counted once."""
    return sum(p.numel() for p in model.parameters())


def layer_sizes(model: nn.Module) -> dict[str, dict[str, int]]:
    """The attributes in which a layer has its sizes, by layer and attribute."""
    sizes = {}
    for name, module in model.named_modules():
        names = [*size_names(module), *group_counts(module)]
        if not names:
            tensors = chain(module.parameters(), module.buffers())
            lengths = {size for x in tensors for size in x.shape if size > 1}
            names = head_attributes(module) or [k for k, x in numbers_of(module) if x in lengths]
        if names:
            sizes[name] = {key: size_of(module, key) for key in names}
    return sizes


def put(module: nn.Module, name: str, value: Tensor) -> None:
    """Exchange a parameter or buffer."""
    holder, key = holder_of(module, name)
    holder[key] = value
    if isinstance(module, nn.RNNBase):
        module._flat_weights[module._flat_weights_names.index(name)] = value


def join_weights(module: nn.Module) -> None:
    """On a GPU, put the weights of a recurrent layer where cuDNN wants them, side by side."""
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters()


def _longer(module: nn.Module, key: str, x: Tensor, entry: Tensor, end: int, gates: int) -> Tensor:
    """A parameter or buffer with the rows of new channels behind its first ``end`` rows.

    Where there are gates, they are behind those of each. The old hidden units of a recurrent layer
    get weights of 0 for the new ones.
    """
    if not isinstance(module, Recurrent):
        if entry.ndim == x.ndim:
            return _insert(x, entry, end)
        old, new = x.unflatten(0, (gates, -1)), entry.transpose(0, 1).flatten(1, 2)
        return torch.cat([old, new], 1).flatten(0, 1)
    count, sides = len(entry), sides_of(module, key)
    columns = [x.shape[1] + sides * count] if reads_itself(module, key) else x.shape[1:]
    longer = x.new_zeros((len(x) + gates * count, *columns))
    old, new, by_gate = (
        y.unflatten(2, (sides, -1)) if y.ndim > 2 else y
        for y in (
            x.unflatten(0, (gates, -1)),
            entry.transpose(0, 1),
            longer.unflatten(0, (gates, -1)),
        )
    )
    by_gate[tuple(map(slice, old.shape))] = old
    by_gate[:, old.shape[1] :][tuple(map(slice, new.shape))] = new
    return longer


def _positions(old: int, new: int, ends: list[int], gates: int = 1) -> Tensor:
    """Where the entries of an axis lie in a longer one: first in each gate, or up to the ends."""
    positions, more = torch.arange(old), new - old
    if gates > 1 and old > 1:
        return positions + positions * gates // old * (more // gates)
    earlier = (positions[:, None] >= torch.tensor(ends)).sum(1)
    return positions + earlier * (more // max(len(ends), 1))


def _replace(change: Widening, module: nn.Module, name: str, value: Tensor) -> None:
    """Put a longer tensor in the place of a parameter or buffer."""
    holder, key = holder_of(module, name)
    before = holder[key]
    earlier = next((p for p in change.exchanges if p[0] is module and p[1] == name), None)
    # With other strides, products would differ in their last bits from those of the model loaded.
    after: Tensor = value.detach().contiguous() if before.is_contiguous() else value.detach()
    if isinstance(before, nn.Parameter):
        after = nn.Parameter(after, before.requires_grad)
    put(module, name, after)
    if earlier is not None:
        change.exchanges.remove(earlier)
        before = earlier[2]
    change.exchanges.append((module, name, before, after))


def _add(change: Widening, module: nn.Module, name: str, count: int) -> None:
    """Add to an attribute that holds a size."""
    size = size_of(module, name)
    change.sizes.append((module, name, size))
    set_size(module, name, size + count)


def exchange(optimizer: Optimizer, later: Mapping[int, Tensor]) -> None:
    """Put other parameters in the exchanges of some, in every group of an optimizer."""
    for group in optimizer.param_groups:
        group["params"] = [later.get(id(p), p) for p in group["params"]]


def _padded_state(
    state: Any, before: Tensor, after: Tensor, gates: int, ends: Sequence[list[int]],
    turn: Callable[[Tensor], Tensor],
) -> dict[str, Any] | None:  # fmt: skip
    """The optimizer's state for a parameter that became longer, with rows in so many gates.

    ``turn`` puts the rows of a layer first, see ``rows_first``.

    None if it is not one of entries: the optimizer then begins anew with this parameter.
    """
    result = dict(state)
    for key, value in result.items():
        if not isinstance(value, Tensor) or not value.ndim:
            if any(not isinstance(x, Tensor) or x.ndim for x in leaves(value)):
                return None
            continue
        # The rows or columns of a factored state have one axis of length 1.
        if value.ndim != after.ndim or any(
            size not in (1, old) for size, old in zip(value.shape, before.shape, strict=True)
        ):
            return None
        sizes = [
            new if size == old else size
            for size, old, new in zip(value.shape, before.shape, after.shape, strict=True)
        ]
        start = FRESH * value.mean() if key in SQUARES else value.new_zeros(())
        # Slow weights, or those at the start, would pull new ones to 0.
        weights = before.detach().to(value.device)  # a state may lie in the memory of the CPU
        if value.shape == weights.shape and (value.float() - weights).norm() < 0.7 * weights.norm():
            start = after.detach().to(value)
        padded = start.expand(sizes).clone()
        longer, value = turn(padded), turn(value)
        rows, *columns = map(_positions, value.shape, longer.shape, ends, (gates, 1))
        longer[(rows[:, None], *columns) if columns else rows] = value
        result[key] = padded
    return result


SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "row_var", "col_var", "variance"}
"""Entries of torch's optimizers that are means or sums of squared gradients."""
