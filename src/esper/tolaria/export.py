"""Export of a grown host, as an ordinary module and as files that run without Esper.

The committed host is exported: seeds that are not fossilised are left out.
"""

import copy
import io
import logging
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from esper.kasmina.blueprints import Form
from esper.kasmina.hosts.host import BlockHost, Host, Tensors
from esper.kasmina.hosts.module import ModuleHost, across_hosts
from esper.kasmina.seed_module import NamedTensors
from esper.kasmina.seeds import SeedState
from esper.kasmina.slots import Slot, SlotSpec
from esper.leyline.stages import Stage
from esper.tolaria.backends.torch import branch, on_pixels, seed_views
from esper.tolaria.plan import Seeds
from esper.tolaria.stores import Stack

INPUT, OUTPUT = "images", "logits"
"""Names of the exported program's input and output."""

TOLERANCE = 1e-5
"""Largest permitted ``difference`` between the outputs of an exported file and of its network."""

_EXAMPLES = 3
"""Images in the traced batch; torch.export treats a batch size of 0 or 1 as a constant."""


class SeedInSlot(NamedTensors):
    """A seed in its slot, over activations ``[B, H, W, 1, C]``.

    Args:
        slot: slot of the seed.
        kind: index of its blueprint.
        form: how the branch is combined with the activation.
        row: the seed's row of the slot's store, ``[width]``.
        alpha: weight of the branch, a scalar ``[]``.
    """

    def __init__(self, slot: SlotSpec, kind: int, form: Form, row: Tensor, alpha: Tensor):
        views = seed_views(slot, kind, form, row[None])
        super().__init__({n: x[0] for n, x in views.items()}, {"alpha": alpha.to(row.dtype)}, False)
        self._what = slot, kind, form

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        """The activation with alpha times the branch added; ``source`` as for ``slot_block``."""
        parameters, buffers = self.stack()
        return x + buffers["alpha"] * branch(*self._what, parameters, x, source)


class GrownSlot(nn.Module):
    """A seed in a slot of a user's module, over ``[B, C, H, W]`` or ``[B, C]``."""

    def __init__(self, seed: SeedInSlot):
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        """The activation with the seed applied."""
        return across_hosts(self.seed, x[None])[0]


class GrownHost(NamedTensors):
    """A host that is a chain of blocks, with the seeds grown in its slots.

    Maps images ``[B, C, H, W]`` to logits ``[B, classes]``, or ``[B, T, classes]`` for sequences.
    """

    def __init__(
        self, host: BlockHost, parameters: Tensors, buffers: Tensors, seeds: dict[int, SeedInSlot]
    ):
        super().__init__(parameters, buffers, trainable=False)
        self.host = host
        self.seeds = nn.ModuleDict({host.slots[s].name: seed for s, seed in seeds.items()})

    def forward(self, images: Tensor) -> Tensor:
        """Logits of ``images``."""
        parameters, buffers = self.stack()
        x = images.permute(0, 2, 3, 1)[:, :, :, None].contiguous()
        sources: dict[int, Tensor] = {}
        for instruction in self.host.program:
            if instruction.kind == "block":
                sources[instruction.number] = x
            if instruction.kind == "slot":
                slot = self.host.slots[instruction.number]
                source = None if slot.span is None else sources[slot.span.block]
                if slot.name in self.seeds:
                    x = on_pixels(partial(self.seeds[slot.name], source=source), x)
            else:
                x = self.host.compute(instruction, parameters, buffers, x, training=False)
        return x[0].unflatten(0, (-1, *self.host.label_shape))


def grown_network(host: Host, stack: Stack, state: SeedState, row: int) -> nn.Module:
    """One host of a stack as a separate module, in evaluation mode.

    Args:
        host: host of the stack.
        stack: parameters.
        state: the seeds; fossilised seeds are included with their alpha.
        row: row of the host in the stack.

    Returns:
        A module from images ``[B, C, H, W]`` to logits ``[B, *label_shape, classes]``, in the dtype
        of the stack and on the CPU. For a ``ModuleHost`` it is a copy of the user's module.
    """
    parameters, buffers = (
        {name: x[0].cpu() for name, x in layout.views(store[row : row + 1]).items()}
        for layout, store in ((host.layout, stack.host), (host.buffers, stack.buffers))
    )
    seeds_to_export = committed_seeds(state)
    seeds = {
        s: SeedInSlot(
            slot,
            int(seeds_to_export.blueprint[row, s]),
            Form(int(seeds_to_export.form[row, s])),
            stack.seeds[s][row].cpu(),
            seeds_to_export.alpha[row, s].cpu(),
        )
        for s, slot in enumerate(host.slots)
        if bool(seeds_to_export.computed[row, s])
    }
    if not isinstance(host, ModuleHost):
        return GrownHost(cast(BlockHost, host), parameters, buffers, seeds).eval()
    module = copy.deepcopy(host.template).to(stack.host.dtype)
    host.load(module, parameters, buffers)
    for s, seed in seeds.items():
        marker = cast(Slot, module.get_submodule(host.slots[s].name))
        marker.grown = GrownSlot(seed)
    return module.requires_grad_(False).eval()


def committed_seeds(state: SeedState) -> Seeds:
    """The fossilised seeds that act, with their alpha."""
    fossils = (state.stage == Stage.FOSSILISED) & (state.alpha > 0)
    alpha = torch.where(fossils, state.alpha, 0.0)
    return Seeds(fossils, state.blueprint, state.style, alpha, state.frozen)


def export_program(network: nn.Module, image: tuple[int, int, int]) -> ExportedProgram:
    """``network`` as a graph of torch operators, for any batch size.

    Args:
        network: as returned by ``grown_network``.
        image: height, width and channels of its input.
    """
    height, width, channels = image
    numbers = next(network.parameters())
    images = torch.zeros(_EXAMPLES, channels, height, width, dtype=numbers.dtype)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        program = torch.export.export(network, (images,), dynamic_shapes=({0: batch},))
    return without_traces(program)


def difference(one: Tensor, two: Tensor) -> float:
    """The largest difference, relative to the largest number of ``one`` if that is above 1."""
    return float((one - two).abs().max()) / max(1.0, float(one.abs().max()))


def without_traces(program: ExportedProgram) -> ExportedProgram:
    """``program`` without stack traces, which hold file paths of the machine that exports."""
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def pt2_bytes(program: ExportedProgram) -> bytes:
    """``program`` as the content of a ``.pt2`` file, to be read by ``torch.export.load``."""
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getvalue()


def onnx_bytes(
    program: ExportedProgram,
    inputs: Sequence[str] | None = (INPUT,),
    outputs: Sequence[str] | None = (OUTPUT,),
) -> bytes:
    """``program`` as the content of an ``.onnx`` file; needs the packages onnx and onnxscript.

    Args:
        program: the program.
        inputs, outputs: names of its inputs and outputs; None for those of the program.
    """
    names: dict[str, Any] = {"input_names": inputs, "output_names": outputs}
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program_of_onnx = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    finally:
        logging.disable(logging.NOTSET)
    assert program_of_onnx is not None
    return program_of_onnx.model_proto.SerializeToString()
