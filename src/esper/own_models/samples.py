"""What a loader yields: inputs and targets, on which device, and how the module is called."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from esper.kasmina.nested import map_leaves, tensors
from esper.leyline.errors import UsageError

TARGETS = ("labels", "label", "targets", "target", "y")
"""Keys of a dict batch that may hold the target, in order of precedence."""
OUTPUTS = ("logits", "output", "prediction")
"""Keys of a dict output that may hold what the loss compares with the target."""

Unpack = Callable[[Any], tuple[Any, Any]]
"""Splits a batch into inputs and target."""


def unpack(batch: Any) -> tuple[Any, Any]:
    """Split a batch into inputs and target.

    - A tuple or list ``(x, y)``: x and y. With more elements the last is the target, and the others
      are arguments of the module.
    - A dict: the target is under one of ``TARGETS``; the others are keyword arguments.
    - A tensor of integers ``[B, T]``: each position but the last, and the integers that follow.
    - Another tensor: the tensor, as input and as target.

    Raises:
        UsageError: the batch is none of these.
    """
    if isinstance(batch, Mapping):
        key = next((key for key in TARGETS if key in batch), None)
        if key is None:
            keys = ", ".join(map(str, batch))
            raise UsageError(
                f"loader: a batch has the keys {keys}; call the target 'labels', or give unpack="
            )
        return {k: v for k, v in batch.items() if k != key}, batch[key]
    several = isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence)
    if several and len(batch) >= 2:
        *inputs, target = batch
        return (inputs[0] if len(inputs) == 1 else tuple(inputs)), target
    if isinstance(batch, Tensor):
        if batch.ndim == 2 and not batch.is_floating_point():
            return batch[:, :-1], batch[:, 1:]
        return batch, batch
    raise UsageError(
        f"loader: a batch is a {type(batch).__name__}; yield (inputs, target), a dict or a tensor, "
        "or give unpack="
    )


def unpack_whole(batch: Any) -> tuple[Any, Any]:
    """The whole batch as input, for a module that computes its own loss; see ``unpack``.

    Raises:
        UsageError: the batch is not a dict.
    """
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"loss: 'model' passes a whole batch to the module, but one is a "
            f"{type(batch).__name__}; yield a dict of its arguments"
        )
    return batch, next((batch[key] for key in TARGETS if key in batch), None)


def unpack_for(loss: object, function: Unpack) -> Unpack:
    """How batches are split: as ``function`` does, or whole if the module computes its own loss."""
    return unpack_whole if loss == "model" and function is unpack else function


def call(model: nn.Module, inputs: Any) -> Any:
    """The output of ``model`` for ``inputs``; see ``as_arguments``."""
    args, kwargs = as_arguments(inputs)
    return model(*args, **kwargs)


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments of a module that ``inputs`` stand for.

    A dict becomes keyword arguments, a tuple positional ones, and anything else the only one.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return tuple(inputs), {}
    return (inputs,), {}


def prediction(output: Any) -> Any:
    """The tensor of an output that named losses compare with the target.

    A dict holds it under one of ``OUTPUTS``, another object as an attribute of such a name.

    Raises:
        UsageError: a dict output has none of the keys ``OUTPUTS``.
    """
    if isinstance(output, Mapping):
        key = next((key for key in OUTPUTS if key in output), None)
        if key is None:
            keys = ", ".join(map(str, output))
            raise UsageError(
                f"model: its output has the keys {keys}; return the prediction as 'logits', or "
                "give a loss of your own"
            )
        return output[key]
    if isinstance(output, tuple):
        return output[0]
    if not isinstance(output, Tensor):
        key = next((key for key in OUTPUTS if hasattr(output, key)), None)
        return output if key is None else getattr(output, key)
    return output


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with what it holds on ``device``.

    Tensors in nested tuples, lists and dicts are moved, and so is every other value with a method
    ``to``, such as a ``PackedSequence``; the rest stays as it is.
    """

    def move(x: Any) -> Any:
        return x.to(device) if callable(getattr(x, "to", None)) else x

    return map_leaves(value, lambda x: x.to(device, non_blocking=True), move)


def first_samples(value: Any, count: int, total: int) -> Any:
    """The first ``count`` samples of what holds ``total`` samples.

    Args:
        value: inputs or targets. Tensors of another length, such as an attention mask, and those
            without an axis belong to all samples and stay whole.
        count: samples to take.
        total: number of samples of the whole inputs; see ``sample_count``.
    """

    def cut(x: Any) -> Any:
        return x[:count] if x.ndim and len(x) == total else x

    def cut_packed(x: Any) -> Any:
        if not isinstance(x, PackedSequence) or sample_count(x) != total:
            return x
        padded, lengths = pad_packed_sequence(x, batch_first=True)
        # Without indices the sequences were given from long to short, and so are the first ones.
        descending = x.sorted_indices is None
        return pack_padded_sequence(padded[:count], lengths[:count], True, descending)

    return map_leaves(value, cut, cut_packed)


def float_tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors in inputs or targets; of a sparse one what it holds."""
    every = (x for x in tensors(value) if x.is_floating_point())
    return [
        x if x.layout == torch.strided else x.to_sparse_coo().coalesce().values() for x in every
    ]


def check_finite(name: str, loader: Iterable[Any], unpack: Unpack) -> None:
    """Refuse data in which a number is missing; reads the loader once.

    Raises:
        UsageError: a batch has NaN or infinite numbers.
    """

    with random_state_kept(loader):
        for number, batch in enumerate(loader, 1):
            for part, values in zip(("inputs", "targets"), unpack(batch), strict=True):
                if not all(bool(x.isfinite().all()) for x in float_tensors(values)):
                    raise UsageError(
                        f"{name}: the {part} of batch {number} have NaN or infinite numbers; "
                        "remove or replace these samples"
                    )


def length(data: Any) -> int | None:
    """The length of a loader or dataset; None if it has none, though it has ``__len__``."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # a ``DataLoader`` of an iterable dataset
        return None


def sample_count(inputs: Any) -> int:
    """Number of samples: the length of the first tensor with an axis, 1 if there is none.

    Of a ``PackedSequence`` it is the number of sequences. What is nested deeper counts only where
    no tensor lies beside it.
    """
    return _count(inputs) or 1


def _count(value: Any) -> int | None:
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    if not isinstance(value, Mapping | tuple | list):
        return None
    parts = list(value.values() if isinstance(value, Mapping) else value)
    parts.sort(key=lambda x: not isinstance(x, Tensor | PackedSequence))
    return next((n for n in map(_count, parts) if n is not None), None)


SAMPLES = 4
"""Samples of passes that look at a module; BatchNorm needs two."""


def separable_count(model: nn.Module, inputs: Any) -> int:
    """``sample_count``, but 1 if they belong together, as the nodes of a graph do."""
    count = sample_count(inputs)
    with evaluating(model), buffers_kept(model):
        try:
            call(model, first_samples(inputs, SAMPLES, count))
        except Exception:
            return 1  # what is wrong with all samples, the next pass raises
    return count


def half_or_all(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[bool], Any]:
    """Forward passes of ``model`` with arguments: of half the samples if true, else of all.

    One sample is not halved, and neither are inputs of which the module refuses a half: a tensor
    may be as long as the batch without belonging to its samples, as a state or a mask may be.
    """
    count = sample_count((*args, *kwargs.values()))
    halves = count > 1

    def run(half: bool) -> Any:
        nonlocal halves
        with random_state_kept():  # what a module draws is the same in each pass
            if half and halves:
                try:
                    half_args, half_kwargs = first_samples((args, kwargs), count // 2, count)
                    return model(*half_args, **half_kwargs)
                except Exception:
                    halves = False  # what is wrong with all samples, the next line raises
            return model(*args, **kwargs)

    return run


def first_batch(loader: Iterable[Any], name: str) -> Any:
    """The first batch of a loader, with the state of all random numbers as before.

    Raises:
        UsageError: the loader is empty, or can be read only once.
    """
    if isinstance(loader, Iterator):
        raise UsageError(f"{name}: it can be read only once; give a DataLoader or a list")
    with random_state_kept(loader):
        for batch in loader:
            return batch
    raise UsageError(f"{name}: it yields no batch; give one that does")


def loader_generators(loaders: Iterable[object]) -> list[torch.Generator]:
    """The generators of loaders and of their samplers, each once."""
    parts = [
        part
        for loader in loaders
        for batches in (loader, getattr(loader, "batch_sampler", None))
        for part in (batches, getattr(batches, "sampler", None))
    ]
    generators = (getattr(part, "generator", None) for part in parts)
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())


def random_state(loaders: Iterable[object]) -> dict[str, Any]:
    """The states of torch's, numpy's and python's generators, and of those of the loaders."""
    arrays: Any = np.random.get_state()
    name, keys, *positions = arrays
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *positions),
        "python": random.getstate(),
        "loaders": [generator.get_state() for generator in loader_generators(loaders)],
    }


def set_random_state(state: dict[str, Any], loaders: Iterable[object]) -> None:
    """The inverse of ``random_state``."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *positions = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *positions))
    random.setstate(state["python"])
    for generator, position in zip(loader_generators(loaders), state["loaders"], strict=True):
        generator.set_state(position)


@contextmanager
def random_state_kept(loader: object = None) -> Iterator[None]:
    """Restore the random numbers of torch, numpy and python, and those of ``loader``, afterwards.

    What is measured besides training must not shift the order of its data, nor its dropout.
    """
    state = random_state([loader])
    try:
        yield
    finally:
        set_random_state(state, [loader])


def output_of(model: nn.Module, inputs: Any) -> Any:
    """What a module computes in evaluation mode; it draws the same random numbers each time."""
    with evaluating(model):
        return call(model, inputs)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undo afterwards what happens to the buffers of a module, in place or by assignment."""
    copies = [
        (module, name, x, x.detach().clone())
        for module in model.modules()
        for name, x in module._buffers.items()
        if x is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, x, before in copies:
                x.copy_(before)
                module._buffers[name] = x


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Put each module in its own mode, training or evaluation, again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def evaluating(model: nn.Module, loader: object = None) -> Iterator[None]:
    """Evaluation mode, without gradients; afterwards modes and random numbers are as before."""
    with random_state_kept(loader), modes_kept(model), torch.no_grad():
        model.eval()
        yield
