"""Any network as a host: a torch module that contains a ``Slot`` wherever a seed may grow.

The forward passes of N modules are one call of ``torch.vmap`` over
``torch.func.functional_call``. This is slower than a host of known blocks, but it works for every
module that vmap supports.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from esper.kasmina.hosts.host import Host, Tensors
from esper.kasmina.slots import Grown, Slot, SlotSpec
from esper.kasmina.stack import Field, Layout
from esper.leyline.errors import UsageError, first_line

_LOCK = RLock()
"""Held while a module is built, because torch's generator is global, and while the template
computes, because its slots then hold the seeds."""


@dataclass(frozen=True)
class ModuleHost(Host):
    """Specification of stacked hosts whose forward pass is that of a module; see ``host.Host``.

    Every parameter that requires a gradient is trained. Other parameters and buffers change only
    where the module's forward pass changes them in training. Buffers are stored in the dtype of the
    stack, so float32 rounds integers above 2^24. BatchNorm requires a momentum. Dropout is not
    supported, because its random draws would depend on the other environments.

    Attributes:
        build: returns a new module, initialised from torch's generator, with a ``Slot`` wherever a
            seed may grow. The module maps images ``[B, C, H, W]`` to logits ``[B, classes]``.
        classes: number of classes.
        image: height, width and channels of an input; a vector is an image of one pixel.
        slot_names: the slots in use; all slots if empty.
    """

    build: Callable[[], nn.Module]
    classes: int
    image: tuple[int, int, int]
    slot_names: tuple[str, ...] = ()

    @cached_property
    def template(self) -> nn.Module:
        """The module whose forward pass is used, with given parameters in place of its own."""
        return self._new_module(0)

    @cached_property
    def _markers(self) -> dict[str, Slot]:
        """The slots by their names within the module."""
        modules = self.template.named_modules()
        return {name: module for name, module in modules if isinstance(module, Slot)}

    @cached_property
    def all_slots(self) -> tuple[SlotSpec, ...]:
        """See ``Host.all_slots``. Runs the module to find them.

        Raises:
            UsageError: the module has no slot, or its forward pass fails, alone or under vmap.
        """
        if not self._markers:
            raise self._fault(
                "has no slot; put an esper.kasmina.Slot(channels) where a seed may grow"
            )
        shapes = self._shapes()
        specs = [
            self._spec(name, shape, (index + 1) / len(shapes))
            for index, (name, shape) in enumerate(shapes)
        ]
        self._try_stacked()
        return tuple(specs)

    @cached_property
    def layout(self) -> Layout:
        """See ``Host.layout``; the initial values are the module's own, see ``initial_values``."""
        parameters = self.template.named_parameters()
        return Layout(tuple(Field(n, tuple(p.shape)) for n, p in parameters if p.requires_grad))

    @cached_property
    def feeding_names(self) -> tuple[tuple[str, ...], ...]:
        """See ``Host.feeding_names``.

        The parameters on which a slot's activation depends and no earlier slot's does; if there are
        none, as behind a pool, those that feed the earlier slot.
        """
        groups: list[tuple[str, ...]] = []
        for depends in self._dependencies():
            fresh = tuple(name for name in depends if not any(name in names for names in groups))
            groups.append(fresh or (groups[-1] if groups else ()))
        return tuple(groups)

    @cached_property
    def buffers(self) -> Layout:
        return Layout(tuple(Field(n, tuple(x.shape)) for n, x in _fixed_values(self.template)))

    @property
    def summary(self) -> str:
        return f"module {type(self.template).__name__}"

    def initial_values(self, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Parameters ``[M, P]`` and buffers ``[M, Q]`` of new modules, in float64.

        Args:
            keys: seeds of torch's generator, one per module.
        """
        modules = [self._new_module(key) for key in keys]
        return (
            torch.stack([_row(module.named_parameters(), self.layout) for module in modules]),
            torch.stack([_row(_fixed_values(module), self.buffers) for module in modules]),
        )

    def load(self, module: nn.Module, parameters: Tensors, buffers: Tensors) -> None:
        """Copy the parameters and buffers of one host, ``[*shape]`` each, into ``module``."""
        tensors = dict(chain(module.named_parameters(), module.named_buffers()))
        with torch.no_grad():
            for name, value in chain(parameters.items(), buffers.items()):
                tensors[name].copy_(value)

    def logits(
        self,
        parameters: Tensors,
        buffers: Tensors,
        images: Tensor,
        training: bool,
        grown: Mapping[int, Grown],
    ) -> Tensor:
        """Compute the logits ``[N, B, classes]`` of N hosts.

        Args:
            parameters: by the names of ``layout``, ``[N, *shape]`` each.
            buffers: by the names of ``buffers``, ``[N, *shape]`` each; updated in training.
            images: ``[B, H, W, N, C]``.
            training: whether the module is in training mode.
            grown: the seeds of all N hosts by slot index, as functions of ``[B, H, W, N, C]``.
        """
        # Copies, because batch norm writes to flattened buffers and the stores' rows are strided.
        copies = {
            name: x.to(self._buffer_dtypes[name] or x.dtype, copy=True).contiguous()
            for name, x in buffers.items()
        }
        with self._growing(training, grown) as module:

            def call(mine: Tensors, module_buffers: Tensors, x: Tensor) -> Tensor:
                logits: Tensor = functional_call(module, (mine, module_buffers), (x,))
                return logits

            logits: Tensor = torch.vmap(call)(parameters, copies, images.permute(3, 0, 4, 1, 2))
        if training:
            with torch.no_grad():
                for name, x in copies.items():
                    buffers[name].copy_(x)
        return logits

    @contextmanager
    def _growing(self, training: bool, grown: Mapping[int, Grown]) -> Iterator[nn.Module]:
        """The template in training or evaluation mode, with the given seeds in its slots."""
        with _LOCK:
            markers = {i: self._markers[self.slots[i].name] for i in grown}
            try:
                for index, marker in markers.items():
                    marker.grown = partial(_AcrossHosts.apply, grown[index])
                yield self.template.train(training)
            finally:
                for marker in markers.values():
                    marker.grown = None

    @cached_property
    def _buffer_dtypes(self) -> dict[str, torch.dtype | None]:
        """The dtype of each buffer, or None if it holds floating-point numbers."""
        return {
            name: None if x.is_floating_point() else x.dtype
            for name, x in _fixed_values(self.template)
        }

    def _new_module(self, key: int) -> nn.Module:
        with _LOCK, torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            try:
                module = self.build()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise UsageError(f"model: build fails ({reason})") from error
        if not isinstance(module, nn.Module):
            raise UsageError(f"model: build returns a {type(module).__name__}; return an nn.Module")
        if any(map(is_lazy, chain(module.parameters(), module.buffers()))):
            raise UsageError("model: it has lazy layers; pass an image through it in build")
        return module

    def _shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names of the slots in the order of the forward pass, with the shapes of their inputs."""
        shapes: list[tuple[str, tuple[int, ...]]] = []

        def note(name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
            shapes.append((name, tuple(arguments[0].shape)))

        hooks = [
            marker.register_forward_pre_hook(partial(note, name))
            for name, marker in self._markers.items()
        ]
        height, width, channels = self.image
        example = next(chain(self.template.parameters(), self.template.buffers()), torch.zeros(()))
        try:
            with torch.no_grad():
                images = torch.zeros(2, channels, height, width, dtype=example.dtype)
                logits = self.template.eval()(images)
        except Exception as error:
            raise self._fault(
                f"rejects images {tuple(images.shape)} ({first_line(error)})"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        if not isinstance(logits, Tensor) or logits.shape != (2, self.classes):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise self._fault(f"returns {got} for 2 images; return logits {(2, self.classes)}")
        names = [name for name, _ in shapes]
        for name in self._markers:
            if names.count(name) != 1:
                raise self._fault(
                    f"calls the slot {name!r} {names.count(name)} times in a forward pass; "
                    "call every slot exactly once"
                )
        return shapes

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _dependencies(self) -> list[list[str]]:
        """For each slot in use, the parameters on which its activation depends."""
        activations: dict[str, Tensor] = {}

        def note(name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
            activations[name] = arguments[0]

        parameters, buffer_rows = self.initial_values([0])
        leaves = {
            n: x[0].clone().requires_grad_() for n, x in self.layout.views(parameters).items()
        }
        constants = {
            name: x[0].to(self._buffer_dtypes[name] or x.dtype)
            for name, x in self.buffers.views(buffer_rows).items()
        }
        height, width, channels = self.image
        images = torch.zeros(2, channels, height, width, dtype=torch.float64)
        with _LOCK:
            hooks = [
                self._markers[slot.name].register_forward_pre_hook(partial(note, slot.name))
                for slot in self.slots
            ]
            try:
                functional_call(self.template.eval(), (leaves, constants), (images,))
            finally:
                for hook in hooks:
                    hook.remove()
        return [_sources(activations[slot.name], leaves) for slot in self.slots]

    def _spec(self, name: str, shape: tuple[int, ...], depth: float) -> SlotSpec:
        channels = self._markers[name].channels
        if len(shape) not in (2, 4) or shape[1] != channels:
            raise self._fault(
                f"passes {shape} to the slot {name!r} of {channels} channels; pass "
                f"[B, {channels}, H, W] or [B, {channels}]"
            )
        if len(shape) == 2:
            return SlotSpec(name, channels, (1, 1), depth, family="mlp")
        return SlotSpec(name, channels, (shape[2], shape[3]), depth)

    def _try_stacked(self) -> None:
        """Run a forward pass of two stacked hosts in training mode, to report errors early."""
        parameters, buffers = self.initial_values([0, 1])
        height, width, channels = self.image
        images = torch.zeros(2, height, width, 2, channels, dtype=parameters.dtype)
        views = self.layout.views(parameters), self.buffers.views(buffers)
        try:
            with torch.no_grad():
                self.logits(*views, images, training=True, grown={})
        except Exception as error:
            raise self._fault(
                f"does not train under torch.vmap ({first_line(error)}); remove dropout, BatchNorm "
                "without momentum and data-dependent branches"
            ) from error

    def _fault(self, what: str) -> UsageError:
        return UsageError(f"model: {type(self.template).__name__} {what}")


def _fixed_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers and frozen parameters, which no gradient changes."""
    yield from module.named_buffers()
    yield from ((name, p) for name, p in module.named_parameters() if not p.requires_grad)


def _row(tensors: Iterator[tuple[str, Tensor]], layout: Layout) -> Tensor:
    """The parameters or buffers of one module in the order of ``layout``, float64 ``[P]``.

    Raises:
        UsageError: their shapes differ from those of the layout.
    """
    numbers = dict(tensors)
    wrong = [f.name for f in layout.fields if numbers[f.name].shape != f.shape]
    if wrong:
        raise UsageError(f"model: {wrong[0]} differs in shape from one build to the next")
    parts = [numbers[f.name].detach().double().flatten() for f in layout.fields]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _sources(x: Tensor, leaves: Tensors) -> list[str]:
    """Names of the ``leaves`` from which ``x`` was computed."""
    if not x.requires_grad:
        return []
    every = list(leaves.values())
    gradients = torch.autograd.grad(x.sum(), every, retain_graph=True, allow_unused=True)
    return [name for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None]


class _AcrossHosts(torch.autograd.Function):
    """Leaves vmap at a slot, because seeds differ between hosts."""

    @staticmethod
    def forward(grown: Grown, x: Tensor) -> Tensor:
        raise AssertionError("called outside vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing: the gradient flows through the operations that ``vmap`` calls."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], grown: Grown, x: Tensor
    ) -> tuple[Tensor, int]:
        assert in_dims[1] is not None, "the activation has an axis of hosts"
        return across_hosts(grown, x.movedim(in_dims[1], 0)), 0


def across_hosts(grown: Grown, x: Tensor) -> Tensor:
    """Apply ``grown``, a function of ``[B, H, W, N, C]``, to ``x``.

    Args:
        grown: the seeds of a slot.
        x: ``[N, B, C, H, W]`` or ``[N, B, C]``.
    """
    if x.ndim == 3:
        return grown(x.transpose(0, 1)[:, None, None].contiguous())[:, 0, 0].transpose(0, 1)
    return grown(x.permute(1, 3, 4, 0, 2).contiguous()).permute(3, 0, 4, 1, 2)
