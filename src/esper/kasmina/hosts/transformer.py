"""The transformer host: a small GPT that predicts the next byte at every position.

Layers are pre-norm (Radford et al., "Language models are unsupervised multitask learners", 2019),
and the head shares its weights with the embedding. A sequence is an image of one row whose only
channel holds the bytes. Slot ``r0cI`` follows layer I.
"""

from dataclasses import dataclass
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor

from esper.kasmina import ops
from esper.kasmina.hosts.host import BlockHost, Instruction, Tensors
from esper.kasmina.slots import SlotSpec
from esper.kasmina.stack import Field, Layout, ones, weight, zeros

EMBEDDING_BOUND = 0.1
"""Embeddings are initialised uniformly within plus or minus this bound. It is small so that the
initial predictions of the shared head are nearly uniform."""


@dataclass(frozen=True)
class TransformerHost(BlockHost):
    """Specification of stacked transformers; see ``hosts.host.Host``.

    Attributes:
        layers: number of layers, each with attention and a perceptron.
        width: channels of an activation.
        heads: attention heads per layer, a divisor of ``width``; with 0, layers have no attention
            and positions do not interact.
        context: bytes per window.
        classes: number of byte values.
        slot_names: the slots in use; all slots if empty.
    """

    layers: int
    width: int
    heads: int
    context: int
    classes: int = 256
    slot_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("layers", "width", "context"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.heads < 0 or (self.heads and self.width % self.heads):
            raise ValueError(f"heads must be 0 or divide width {self.width}, got {self.heads}")

    @property
    def image(self) -> tuple[int, int, int]:  # type: ignore[override]  # nobody writes to it
        """Height, width and channels of a row of bytes."""
        return 1, self.context, 1

    @property
    def label_shape(self) -> tuple[int, ...]:
        """One label per position: the next byte."""
        return (self.context,)

    @cached_property
    def all_slots(self) -> tuple[SlotSpec, ...]:
        size = (1, self.context)
        return tuple(
            SlotSpec(f"r0c{i}", self.width, size, (i + 1) / self.layers, family="sequence")
            for i in range(self.layers)
        )

    @cached_property
    def program(self) -> tuple[Instruction, ...]:
        """See ``BlockHost.program``. Block 0 is the embedding, block I + 1 is layer I."""
        program = [Instruction("input", 0), Instruction("block", 0)]
        for layer in range(self.layers):
            program += [Instruction("block", layer + 1), *self.slot_at(f"r0c{layer}")]
        return (*program, Instruction("head", 0))

    @cached_property
    def layout(self) -> Layout:
        width = self.width
        fields = [
            Field("byte.weight", (self.classes, width), EMBEDDING_BOUND),
            Field("position.weight", (self.context, width), EMBEDDING_BOUND),
        ]
        for layer in range(1, self.layers + 1):
            if self.heads:
                fields += [
                    *_norm_fields(f"attention{layer}.norm", width),
                    weight(f"attention{layer}.joint.weight", 3 * width, width),
                    weight(f"attention{layer}.out.weight", width, width),
                ]
            fields += [
                *_norm_fields(f"perceptron{layer}.norm", width),
                weight(f"perceptron{layer}.widen.weight", 4 * width, width),
                weight(f"perceptron{layer}.narrow.weight", width, 4 * width),
            ]
        return Layout((*fields, *_norm_fields("head.norm", width)))

    @property
    def feeding_names(self) -> tuple[tuple[str, ...], ...]:
        """See ``Host.feeding_names``: all parameters of the layer."""
        names = [field.name for field in self.layout.fields]
        return tuple(
            tuple(name for name in names if name.startswith((f"attention{i}.", f"perceptron{i}.")))
            for i in self.feeding_blocks
        )

    @cached_property
    def buffers(self) -> Layout:
        """See ``Host.buffers``. LayerNorm has none."""
        return Layout(())

    @property
    def summary(self) -> str:
        return f"gpt {self.layers} x {self.width}, heads {self.heads}, context {self.context}"

    def enter(self, images: Tensor) -> Tensor:
        """The bytes, unchanged; see ``BlockHost.enter``."""
        return images

    # Native twin: hosts/transformer.h, transformer_block.
    def block(
        self, parameters: Tensors, buffers: Tensors, index: int, x: Tensor, training: bool
    ) -> Tensor:
        """The embedding of the bytes, or a layer; see ``BlockHost.block``."""
        if index == 0:
            positions = parameters["position.weight"].transpose(0, 1)
            return ops.embedding(x[..., 0].long(), parameters["byte.weight"]) + positions
        if self.heads:
            y = _norm(parameters, f"attention{index}.norm", x)
            joint = ops.dense(y, parameters[f"attention{index}.joint.weight"])
            values = ops.causal_attention(joint, self.heads)
            x = x + ops.dense(values, parameters[f"attention{index}.out.weight"])
        y = _norm(parameters, f"perceptron{index}.norm", x)
        wide = F.gelu(ops.dense(y, parameters[f"perceptron{index}.widen.weight"]))
        return x + ops.dense(wide, parameters[f"perceptron{index}.narrow.weight"])

    def head(self, parameters: Tensors, x: Tensor) -> Tensor:
        """LayerNorm, then the transposed embedding, at every position; see ``BlockHost.head``."""
        y = _norm(parameters, "head.norm", x)
        return ops.linear(y.flatten(0, 2).transpose(0, 1), parameters["byte.weight"])


def _norm_fields(name: str, width: int) -> tuple[Field, Field]:
    return ones(f"{name}.weight", width), zeros(f"{name}.bias", width)


def _norm(parameters: Tensors, name: str, x: Tensor) -> Tensor:
    return ops.layer_norm(x, parameters[f"{name}.weight"], parameters[f"{name}.bias"])
