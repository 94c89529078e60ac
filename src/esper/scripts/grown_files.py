"""The files of a network that ``esper grow --model`` trained, each read back and compared."""

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import torch
from msgspec import Struct, convert, field
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from esper.karn.grown_runs import RESULT
from esper.kasmina.nested import map_leaves
from esper.leyline.disk import read_sealed_json, replace_sealed_json, replace_synced
from esper.leyline.errors import UsageError, first_line
from esper.leyline.extras import require
from esper.leyline.notices import notice
from esper.own_models.growth_result import GrowthResult
from esper.own_models.objectives import Validation
from esper.own_models.samples import (
    as_arguments,
    call,
    evaluating,
    first_samples,
    prediction,
    sample_count,
)
from esper.own_models.verdict import table_lines
from esper.own_models.written_code import CODE_FILE, STATE_FILE, rebuilding_code, write_grown
from esper.runtime.own_files import OwnFile
from esper.tolaria.export import TOLERANCE, difference, onnx_bytes, pt2_bytes, without_traces

PROGRAM, ONNX, PICTURE = "model.pt2", "model.onnx", "growth.svg"


def write_files(
    folder: Path,
    result: GrowthResult,
    selection: GrowthResult,
    source: OwnFile,
    inputs: Any,
    onnx: Path | None,
    text: str,
) -> int:
    """Write state_dict, rebuild.py, model.pt2, model.onnx, the picture, and result.json at last.

    Args:
        folder: exists.
        result: the grown network.
        selection: that, or its twin.
        source: builds the module anew.
        inputs: a batch of inputs on the CPU.
        onnx: where the ONNX file goes; None for ``ONNX`` if the libraries are installed.
        text: what was printed about the result.

    Returns:
        exit status: 1 if a file does not compute what the module does, or if ``onnx`` is given and
        that file could not be made.
    """
    selection.model.cpu()
    reference = outputs(selection.model, inputs)
    try:
        write_grown(selection.model, folder, selection.widths, selection.copies)
        _draw(result, folder)
        code = rebuilding_code(selection.model, selection.widths, selection.copies)
        name = f"{STATE_FILE} and {CODE_FILE}"
        differs = {name: _rebuild(folder, code, source, inputs, reference)}
        differs |= _write_programs(folder, selection, inputs, onnx, reference)
        # The comparison is also false for NaN.
        wrong = {name for name, by in differs.items() if not by <= TOLERANCE}
        for name, by in differs.items():
            if name in wrong:
                notice(f"esper: {name} differs from the network by {by:.1e}")
            else:
                print(f"wrote {name} in {folder}, differs by at most {by:.1e}")
        if wrong:
            return 1
        print(f"to train on without Esper: rebuild(model, '{STATE_FILE}') of {CODE_FILE}")
        missing = onnx is not None and ONNX not in differs
        content = {
            "text": text,
            "grown": result.plain(),
            "chosen_is_grown": selection is result,
            "seeds": result.seeds,
            "twin": None if result.twin is None else result.twin.plain(),
            "worth": [result.worth, None if result.twin is None else result.twin.worth],
            "paid": result.paid,
            "status": int(missing),
        }
        replace_sealed_json(folder / RESULT, content)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"out: cannot write into {folder} ({reason}); make room, and rerun the same command"
        ) from error
    if missing:
        notice(f"esper: onnx: {onnx} was not written, for the reason above")
    return int(missing)


class Figures(Struct):
    """What ``result.json`` says of a network."""

    validation: Validation
    test: Validation | None
    parameters: int


class ResultFile(Struct):
    """What a rerun needs of ``result.json``."""

    text: str
    grown: Figures
    twin: Figures | None
    payoff: bool | None = field(name="paid")
    status: Literal[0, 1]


def read_finished(folder: Path) -> ResultFile:
    """What ``write_files`` wrote at last.

    Raises:
        UsageError: the file is damaged.
    """
    path = folder / RESULT
    try:
        return convert(read_sealed_json(path), ResultFile)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"out: {path} is damaged ({first_line(error)}); remove {folder} to grow anew"
        ) from error


def _draw(result: GrowthResult, folder: Path) -> None:
    """Draw the growth; a line instead if the library is missing."""
    try:
        require("report", f"no {PICTURE}")
    except UsageError as missing:
        print(missing)
        return
    picture = io.BytesIO()
    result.plot().savefig(picture, format="svg")
    replace_synced(folder / PICTURE, picture.getvalue())


def _rebuild(
    folder: Path, code: str, source: OwnFile, inputs: Any, reference: torch.Tensor
) -> float:
    """Rebuild the module as a process without Esper would; the difference of its outputs."""
    names: dict[str, Any] = {"__name__": "rebuild"}
    # Not the file read back: nothing that may have changed on the disk is executed.
    exec(compile(code, CODE_FILE, "exec"), names)
    again = names["rebuild"](source.build().cpu(), str(folder / STATE_FILE))
    return difference(reference, outputs(again, inputs))


def _write_programs(
    folder: Path, selection: GrowthResult, inputs: Any, onnx: Path | None, reference: torch.Tensor
) -> dict[str, float]:
    """Write the exported programs that torch can make; the difference of the outputs of each."""
    try:
        portable = export(selection.model, inputs)
        content = pt2_bytes(portable.program)
    except Exception as error:
        print(f"no {PROGRAM}: torch.export cannot trace the model ({first_line(error)})")
        return {}
    size = portable.batch_size
    if size is not None:
        inputs = first_samples(inputs, size, sample_count(inputs))
    differs = _write_program(PROGRAM, folder / PROGRAM, content, outputs_of_file, inputs, reference)
    if differs and size is not None:
        print(f"{PROGRAM} takes batches of {size} alone ({portable.reason})")
    try:
        require("onnx", f"no {ONNX}", "onnxruntime")
        content = onnx_bytes(portable.program, None, None)
    except UsageError as missing:
        print(missing)
        return differs
    except Exception as error:
        print(f"no {ONNX}: torch.onnx cannot write the model ({first_line(error)})")
        return differs
    path = onnx or folder / ONNX
    return differs | _write_program(ONNX, path, content, outputs_of_onnx, inputs, reference)


def _write_program(
    name: str,
    path: Path,
    content: bytes,
    read: Callable[[bytes, Any], torch.Tensor],
    inputs: Any,
    reference: torch.Tensor,
) -> dict[str, float]:
    """Write an exported file, and by its name the difference of its outputs.

    A line instead if it cannot be read back or run.
    """
    try:
        values = read(content, inputs)
    except Exception as error:
        print(f"no {name}: the exported file cannot be read back and run ({first_line(error)})")
        return {}
    replace_synced(path, content)
    return {name: difference(reference[: len(values)], values)}


EXAMPLES = 3
"""Samples of the traced batch; torch.export treats a batch size of 0 or 1 as a constant."""


@dataclass(frozen=True, slots=True)
class Export:
    """A module in evaluation mode as a graph of torch operators.

    Attributes:
        program: the graph.
        batch_size: the batch size it takes; None for any.
        reason: why the batch size is fixed; empty if it is not.
    """

    program: ExportedProgram
    batch_size: int | None = None
    reason: str = ""


def export(model: nn.Module, inputs: Any) -> Export:
    """Export ``model`` in evaluation mode, for any batch size if its code allows it.

    Args:
        model: the module; it stays as it is.
        inputs: a batch of its inputs: a tensor, a tuple or a dict, on the CPU.

    Raises:
        Exception: torch.export cannot trace the module; which error it raises is undocumented.
    """
    network = copy.deepcopy(model).cpu().requires_grad_(False).eval()
    total = sample_count(inputs)
    some = first_samples(inputs, EXAMPLES, total)
    batch = Dim("batch", min=1)

    def varies(x: Tensor) -> dict[int, Dim] | None:
        return {0: batch} if x.ndim and len(x) == total else None

    args, kwargs = as_arguments(inputs)
    try:
        return Export(_program(network, some, map_leaves(kwargs or args, varies, lambda x: None)))
    except Exception as error:
        return Export(_program(network, some, None), sample_count(some), first_line(error))


def outputs(model: nn.Module, inputs: Any) -> Tensor:
    """The prediction of ``model`` in evaluation mode, on the CPU in float32."""
    with evaluating(model):
        values: Tensor = prediction(call(model, inputs))
    return values.float().cpu()


def outputs_of_file(content: bytes, inputs: Any) -> Tensor:
    """The prediction of the program in a ``.pt2`` file, float32."""
    module = torch.export.load(io.BytesIO(content)).module()
    with torch.no_grad():
        values: Tensor = prediction(call(module, inputs))
    return values.float()


def outputs_of_onnx(content: bytes, inputs: Any) -> Tensor:
    """The first output of the program in an ``.onnx`` file, float32; needs onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    pairs = zip(session.get_inputs(), _tensors(inputs), strict=True)
    values = session.run(None, {each.name: x.numpy() for each, x in pairs})
    return torch.from_numpy(values[0]).float()


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


def growth_seeds_table(runs: Mapping[int, ResultFile | None]) -> str:
    """A line for each seed, and the means with standard deviations over seeds.

    Accuracies are in percent and their gains in points; other figures are as they are. Figures are
    those of the test split, or of validation without one.

    Args:
        runs: what ``result.json`` says by seed; None where there is none.
    """
    results = [run for run in runs.values() if run is not None]
    has_test = all(run.grown.test for run in results)

    def validation_of(figures: Figures) -> Validation:
        return figures.test if has_test and figures.test else figures.validation

    split = "test" if has_test else "validation"
    percent = all(validation_of(run.grown).unit == "accuracy" for run in results)
    scale, digits, unit = (100.0, 1, " %") if percent else (1.0, 4, "")

    def mean(values: list[float], unit: str, sign: str = "") -> str:
        deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{fmean(values):{sign}.{digits}f}{deviation}{unit}" if values else ""

    heads = ("seed", f"grown ({split})", f"never grown ({split})", "parameters", "gain")
    lines: list[tuple[str, ...]] = [heads]
    figures: dict[str, list[float]] = {"grown": [], "twin": []}
    gains = []
    for seed, run in runs.items():
        if run is None:
            lines.append((str(seed), "failed", "", "", ""))
            continue
        cells = {"twin": "", "gain": ""}
        for name, network in (("grown", run.grown), ("twin", run.twin)):
            if network is not None:
                figures[name].append(scale * validation_of(network).figure)
                cells[name] = validation_of(network).shown()
        if run.twin is not None:
            gains.append(figures["grown"][-1] - figures["twin"][-1])
            cells["gain"] = f"{gains[-1]:+.{digits}f}"
        parameters = f"{run.grown.parameters:,}"
        lines.append((str(seed), cells["grown"], cells["twin"], parameters, cells["gain"]))
    means = (mean(values, unit) for values in figures.values())
    lines.append(("mean", *means, "", mean(gains, "", "+")))
    text = table_lines(lines, labels=len(lines[0]))
    if len(results) > 1:
        kind = "gains are in points of accuracy; " if percent and gains else ""
        text.append(f"{kind}± is the standard deviation over seeds")
    if gains:
        payoffs = sum(bool(run.twin and run.payoff) for run in results)
        text.append(f"growth paid on validation after its price in {payoffs} of {len(gains)} seeds")
    return "\n".join(text)
