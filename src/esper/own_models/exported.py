"""Files of a module of the user's own that run without Esper, and what they differ by."""

import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from esper.leyline.errors import first_line
from esper.own_models.samples import (
    as_arguments,
    call,
    evaluating,
    first_samples,
    mapped,
    prediction,
    sample_count,
    undisturbed,
)
from esper.tolaria.export import onnx_bytes, pt2_bytes, without_traces

EXAMPLES = 3
"""Samples of the traced batch; torch.export treats a batch size of 0 or 1 as a constant."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A module in evaluation mode as a graph of torch operators.

    Attributes:
        program: the graph.
        fixed: the batch size it takes; None for any.
        reason: why the batch size is fixed; empty if it is not.
    """

    program: ExportedProgram
    fixed: int | None = None
    reason: str = ""

    def pt2(self) -> bytes:
        """The content of a ``.pt2`` file."""
        return pt2_bytes(self.program)

    def onnx(self) -> bytes:
        """The content of an ``.onnx`` file; needs the packages onnx and onnxscript."""
        return onnx_bytes(self.program, named=False)


def exported(model: nn.Module, inputs: Any) -> Exported:
    """Export ``model`` in evaluation mode, for any batch size if its code allows it.

    Args:
        model: the module; it stays as it is.
        inputs: a batch of its inputs: a tensor, a tuple or a dict, on the CPU.

    Raises:
        Exception: torch.export cannot trace the module; which error it raises is undocumented.
    """
    traced = copy.deepcopy(model).cpu().requires_grad_(False).eval()
    total = sample_count(inputs)
    some = first_samples(inputs, EXAMPLES, total)
    batch = Dim("batch", min=1)

    def varies(x: Tensor) -> dict[int, Dim] | None:
        return {0: batch} if x.ndim and len(x) == total else None

    args, kwargs = as_arguments(inputs)
    try:
        return Exported(_program(traced, some, mapped(kwargs or args, varies, lambda x: None)))
    except Exception as error:
        found = Exported(_program(traced, some, None), sample_count(some), first_line(error))
    return found


def outputs(model: nn.Module, inputs: Any) -> Tensor:
    """The prediction of ``model`` in evaluation mode, on the CPU in float32."""
    with undisturbed(), evaluating(model), torch.no_grad():
        found: Tensor = prediction(call(model, inputs))
    return found.float().cpu()


def outputs_of_file(content: bytes, inputs: Any) -> Tensor:
    """The prediction of the program in a ``.pt2`` file, float32."""
    module = torch.export.load(io.BytesIO(content)).module()
    with torch.no_grad():
        found: Tensor = prediction(call(module, inputs))
    return found.float()


def outputs_of_onnx(content: bytes, inputs: Any) -> Tensor:
    """The first output of the program in an ``.onnx`` file, float32; needs onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    named = zip(session.get_inputs(), _tensors(inputs), strict=True)
    found = session.run(None, {each.name: x.numpy() for each, x in named})
    return torch.from_numpy(found[0]).float()


def _program(model: nn.Module, inputs: Any, shapes: Any) -> ExportedProgram:
    """The graph for ``inputs``; ``shapes`` says which of their axes vary, None that none does."""
    args, kwargs = as_arguments(inputs)
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    return without_traces(program)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value
    return [x for part in parts for x in _tensors(part)] if hasattr(parts, "__iter__") else []
