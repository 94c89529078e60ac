"""A grown host leaves the stack: an ordinary module, and files that run without Esper.

What leaves is the host as it is committed: seeds that are not fossilised stay behind.
"""

import copy
import io
import logging
import warnings
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from esper.kasmina import ops
from esper.kasmina.hosts.host import BlockHost, Host, Tensors
from esper.kasmina.hosts.module import ModuleHost, Slot, across_hosts
from esper.kasmina.seeds import SeedState
from esper.kasmina.slots import SlotSpec
from esper.kasmina.stack import Stack
from esper.leyline.stages import Stage
from esper.tolaria.backends.torch import branch, seed_views
from esper.tolaria.plan import Form, Seeds

INPUT, OUTPUT = "images", "logits"
"""Names of what the exported program takes and gives."""

_EXAMPLES = 3
"""Images of the trace; with 0 or 1 torch.export would take the number for a constant."""


class _Numbers(nn.Module):
    """Holds parameters and buffers under dotted names, as an ordinary module would."""

    def __init__(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]):
        super().__init__()
        self._names = tuple(parameters), tuple(buffers)
        for name, value in parameters.items():
            holder, leaf = self._holder(name)
            holder.register_parameter(leaf, nn.Parameter(value.detach().clone(), False))
        for name, value in buffers.items():
            holder, leaf = self._holder(name)
            holder.register_buffer(leaf, value.detach().clone())

    def _holder(self, name: str) -> tuple[nn.Module, str]:
        *path, leaf = name.split(".")
        holder: nn.Module = self
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        return holder, leaf

    def _stacked(self) -> tuple[Tensors, Tensors]:
        """Parameters and buffers of a stack of one, ``[1, *shape]``."""
        parameters, buffers = self._names
        return (
            {name: self.get_parameter(name)[None] for name in parameters},
            {name: self.get_buffer(name)[None] for name in buffers},
        )


class GrownSeed(_Numbers):
    """A seed in its slot, over activations ``[B, H, W, 1, C]``.

    Args:
        slot: where it lives.
        kind: its blueprint.
        form: how it enters the activation.
        row: of the slot's store, ``[width]``.
        alpha: how much of it enters, a number ``[]``.
    """

    def __init__(self, slot: SlotSpec, kind: int, form: Form, row: Tensor, alpha: Tensor):
        views = seed_views(slot, kind, form, row[None])
        super().__init__({n: x[0] for n, x in views.items()}, {"alpha": alpha.to(row.dtype)})
        self._what = slot, kind, form

    def forward(self, x: Tensor) -> Tensor:
        parameters, buffers = self._stacked()
        return x + buffers["alpha"] * branch(*self._what, parameters, x)


class GrownSlot(nn.Module):
    """A seed in the slot of somebody's own module, over ``[B, C, H, W]`` or ``[B, C]``."""

    def __init__(self, seed: GrownSeed):
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        return across_hosts(self.seed, x[None])[0]


class GrownHost(_Numbers):
    """A host that is a chain of blocks, with what has grown in its slots.

    Takes images ``[B, C, H, W]`` and gives logits ``[B, classes]``, of sequences
    ``[B, T, classes]``.
    """

    def __init__(
        self, host: BlockHost, parameters: Tensors, buffers: Tensors, seeds: dict[int, GrownSeed]
    ):
        super().__init__(parameters, buffers)
        self.host = host
        self.seeds = nn.ModuleDict({host.slots[s].name: seed for s, seed in seeds.items()})

    def forward(self, images: Tensor) -> Tensor:
        parameters, buffers = self._stacked()
        x = images.permute(0, 2, 3, 1)[:, :, :, None]
        for kind, index in self.host.program:
            if kind == "input":
                x = self.host.enter(x.contiguous())
            elif kind == "block":
                x = self.host.block(parameters, buffers, index, x, training=False)
            elif kind == "pool":
                x = ops.max_pool(x)
            elif kind == "slot":
                name = self.host.slots[index].name
                x = self.seeds[name](x) if name in self.seeds else x
            else:
                x = self.host.head(parameters, x)[0].unflatten(0, (-1, *self.host.label_shape))
        return x


def grown_network(host: Host, stack: Stack, state: SeedState, row: int) -> nn.Module:
    """One host of a stack as a module of its own, in evaluation mode.

    Args:
        host: what the stack is made of.
        stack: parameters.
        state: the seeds; those that are fossilised come along, at their alpha.
        row: which host.

    Returns:
        From images ``[B, C, H, W]`` to logits ``[B, *label_shape, classes]``, in the dtype of the
        stack and on the CPU. A ``ModuleHost`` gives a copy of the user's module.
    """
    parameters, buffers = (
        {name: x[0].cpu() for name, x in layout.views(store[row : row + 1]).items()}
        for layout, store in ((host.layout, stack.host), (host.buffers, stack.buffers))
    )
    kept = committed(state)
    seeds = {
        s: GrownSeed(
            slot,
            int(kept.blueprint[row, s]),
            Form(int(kept.form[row, s])),
            stack.seeds[s][row].cpu(),
            kept.alpha[row, s].cpu(),
        )
        for s, slot in enumerate(host.slots)
        if bool(kept.computed[row, s])
    }
    if not isinstance(host, ModuleHost):
        return GrownHost(cast(BlockHost, host), parameters, buffers, seeds).eval()
    module = copy.deepcopy(host.template).to(stack.host.dtype)
    host.load(module, parameters, buffers)
    for s, seed in seeds.items():
        marker = cast(Slot, module.get_submodule(host.slots[s].name))
        marker.grown = GrownSlot(seed)
    return module.requires_grad_(False).eval()


def committed(state: SeedState) -> Seeds:
    """The seeds that are fossilised, as they act."""
    fossils = (state.stage == Stage.FOSSILISED) & (state.alpha > 0)
    alpha = torch.where(fossils, state.alpha, 0.0)
    return Seeds(fossils, state.blueprint, state.style, alpha, state.frozen)


def export_program(network: nn.Module, image: tuple[int, int, int]) -> ExportedProgram:
    """``network`` as a graph of torch's own operators, for any number of images.

    Args:
        network: of ``grown_network``.
        image: height, width and channels of its input.
    """
    height, width, channels = image
    numbers = next(network.parameters())
    images = torch.zeros(_EXAMPLES, channels, height, width, dtype=numbers.dtype)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        program = torch.export.export(network, (images,), dynamic_shapes=({0: batch},))
    for node in program.graph.nodes:
        # Where in whose source code it came from is nobody else's business.
        node.meta.pop("stack_trace", None)
    return program


def packed(program: ExportedProgram) -> bytes:
    """The content of a ``.pt2`` file, which ``torch.export.load`` reads."""
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getvalue()


def packed_onnx(program: ExportedProgram) -> bytes:
    """The content of a ``.onnx`` file; needs the libraries onnx and onnxscript."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.onnx.export(
                program, dynamo=True, input_names=[INPUT], output_names=[OUTPUT], verbose=False
            )
    finally:
        logging.disable(logging.NOTSET)
    assert found is not None
    return found.model_proto.SerializeToString()
