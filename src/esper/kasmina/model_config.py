"""The config of which a model is built: its numbers follow when layers have become wider.

Classes of Hugging Face's, nanoGPT and others take an object ``config``, and are built anew by its
numbers before they load weights. How deep a stack is says ``deeper_stacks.numbering``.
"""

import copy
import inspect
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from esper.kasmina.layer_kinds import numbers_of
from esper.kasmina.nested import entries_of
from esper.kasmina.wider_groups import equal

MOST_TRIALS, MOST_LISTS = 64, 8
"""Combinations of numbers that are tried, and of those in one list."""
Number = int | list[int] | tuple[int, ...] | None


@dataclass(frozen=True)
class ConfigChange:
    """Numbers that a config has now: the object that holds one, its name, and the value before and
    now; None where there is none."""

    entries: tuple[tuple[Any, str, Number, Number], ...] = ()

    def apply(self) -> None:
        """Put the later values in."""
        for holder, key, _, new in self.entries:
            entries_of(holder)[key] = new

    def undo(self) -> None:
        """Put the earlier values in."""
        for holder, key, old, _ in self.entries:
            entries_of(holder)[key] = old
            if old is None:
                del entries_of(holder)[key]


def lines(change: ConfigChange | None, hint: str = "") -> list[str]:
    """What ``follow`` did, in a line if there is something to say."""
    if change is None:
        return [f"config: no numbers of it give these sizes: its class builds no such model{hint}"]
    texts = [f"{key} {old or 'unset'} -> {new}" for _, key, old, new in change.entries]
    return [f"config: {', '.join(texts)}"] if texts else []


def follow(
    model: nn.Module, before: Mapping[str, torch.Size], output: Callable[[nn.Module], Any]
) -> ConfigChange | None:
    """Let the numbers of ``model.config`` follow its layers, in place.

    Nothing follows in a model whose class does not take a config first.

    Args:
        model: a model that has become larger.
        before: the shapes of its parameters before, by name.
        output: what a model computes of some inputs, always the same.

    Returns:
        what was changed; None if by no numbers that were tried the class builds a model that has
        the same state and computes the same. The config is what it was then.
    """
    after, sizes = parameter_shapes(model), defaultdict[int, set[int]](set)
    takes_config = next(iter(inspect.signature(type(model)).parameters), "") == "config"
    if before == after or not takes_config:
        return ConfigChange()
    reference = output(model)
    for name in before.keys() & after.keys():
        for old, new in zip(before[name], after[name], strict=True):
            sizes[old].add(new)
    numbers = list(_numbers(model.config, sizes))
    for values in islice(product(*(options for *_, options in numbers)), MOST_TRIALS):
        entries = [(*number[:3], x) for number, x in zip(numbers, values, strict=True)]
        change = ConfigChange(tuple(each for each in entries if each[2] != each[3]))
        change.apply()
        try:
            with torch.device("meta"):
                is_alike = parameter_shapes(_new_model(model)) == after
            if is_alike and all(equal(reference, output(x)) for x in (model, _twin(model))):
                return change
        except Exception:  # numbers that do not fit together
            pass
        change.undo()
    return None


def parameter_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The shape of each parameter, by name."""
    return {name: p.shape for name, p in model.named_parameters()}


def _new_model(model: Any) -> nn.Module:
    with torch.random.fork_rng([]), warnings.catch_warnings(action="ignore"):
        new: nn.Module = type(model)(copy.deepcopy(model.config))
    return new


def _twin(model: nn.Module) -> nn.Module:
    """A model that is built of the same config, with the same state."""
    twin, example = _new_model(model), next(model.parameters())
    twin.to(example.device, example.dtype).load_state_dict(model.state_dict())
    return twin


def _numbers(
    config: Any, sizes: Mapping[int, set[int]]
) -> Iterator[tuple[Any, str, Number, list[Number]]]:
    """Numbers that may follow: what holds them, their name, value and what they may become."""
    entries = entries_of(config)
    firsts = {key: x[0] if _is_list(x) else x for key, x in entries.items()}
    names = {key for key, _ in numbers_of(SimpleNamespace(**firsts)) if "position" not in key}
    ratios = {(old, new) for old, later in sizes.items() for new in later if old > 1}

    def options_of(key: str, value: int) -> list[int]:
        options = sizes.get(value, set()) if key in names else set()
        if re.search("head(?!_dim|_size)", key):
            options = {value * new // old for old, new in ratios if value * new % old == 0}
        return sorted({value, *options}, reverse=True)

    for key, value in entries.items():
        if type(value).__name__.endswith("Config"):
            yield from _numbers(value, sizes)
        options: list[Number] = []
        if type(value) is int:
            options = [*options_of(key, value)]
        elif _is_list(value):
            choices = product(*(options_of(key, x) for x in value))
            options = [type(value)(each) for each in islice(choices, MOST_LISTS)]
        if options and options != [value]:
            yield config, key, value, options
    whole = SimpleNamespace(**entries) if isinstance(config, dict) else config  # with properties
    width, heads = (getattr(whole, key, 0) for key in ("hidden_size", "num_attention_heads"))
    # Without a number of their own, heads share the width.
    if type(heads) is int and heads and not hasattr(whole, "head_dim"):
        yield config, "head_dim", None, [None, width // heads]


def _is_list(value: object) -> bool:
    """Whether it holds a number for each of several stages."""
    return isinstance(value, list | tuple) and {*map(type, value)} == {int}
