"""The files of a network that ``esper grow --model`` trained, each read back and compared."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from esper.leyline.disk import replace_synced
from esper.leyline.errors import UsageError, first_line
from esper.leyline.extras import require
from esper.leyline.notices import notice
from esper.own_models.exported import (
    exported,
    outputs,
    outputs_of_file,
    outputs_of_onnx,
)
from esper.own_models.growth_result import GrowthResult
from esper.own_models.samples import first_samples, sample_count
from esper.own_models.written_code import CODE_FILE, STATE_FILE
from esper.runtime.own_files import OwnFile
from esper.tolaria.export import TOLERANCE, difference

FINISHED, PROGRAM, ONNX, PICTURE = "result.json", "model.pt2", "model.onnx", "growth.svg"


def write_files(
    folder: Path,
    result: GrowthResult,
    chosen: GrowthResult,
    own: OwnFile,
    inputs: Any,
    onnx: Path | None,
    text: str,
) -> int:
    """Write state_dict, rebuild.py, model.pt2, model.onnx, the picture, and result.json at last.

    Args:
        folder: exists.
        result: the grown network.
        chosen: that, or its twin.
        own: builds the module anew.
        inputs: a batch of inputs on the CPU.
        onnx: where the ONNX file goes; None for ``ONNX`` if the libraries are installed.
        text: what was printed about the result.

    Returns:
        exit status: 1 if a file does not compute what the module does, or if ``onnx`` is given and
        that file could not be made.
    """
    chosen.model.cpu()
    expected = outputs(chosen.model, inputs)
    try:
        chosen.save(folder)
        _draw(result, folder)
        differs = {f"{STATE_FILE} and {CODE_FILE}": _rebuilt(folder, own, inputs, expected)}
        differs |= _write_programs(folder, chosen, inputs, onnx, expected)
    except OSError as error:
        raise UsageError(f"out: cannot write into {folder} ({error.strerror})") from error
    wrong = {name: by for name, by in differs.items() if not by <= TOLERANCE}
    for name, by in differs.items():
        if name in wrong:
            notice(f"esper: {name} differs from the network by {by:.1e}")
        else:
            print(f"wrote {name} in {folder}, differs by at most {by:.1e}")
    if wrong:
        return 1
    print(f"to train on without Esper: rebuild(model, '{STATE_FILE}') of {CODE_FILE}")
    content = {"text": text, "grown": result.plain(), "chosen_is_grown": chosen is result}
    content["seeds"] = result.seeds
    content["twin"] = None if result.twin is None else result.twin.plain()
    content["worth"] = [result.worth, None if result.twin is None else result.twin.worth]
    content["paid"] = result.paid
    missing = onnx is not None and ONNX not in differs
    content["status"] = int(missing)
    replace_synced(folder / FINISHED, (json.dumps(content) + "\n").encode())
    if missing:
        notice(f"esper: onnx: {onnx} was not written, for the reason above")
    return int(missing)


def read_finished(folder: Path) -> dict[str, Any]:
    """What ``write_files`` wrote at last.

    Raises:
        UsageError: the file is damaged.
    """
    path = folder / FINISHED
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if not {"text", "grown", "twin", "paid", "status"} <= found.keys():
            raise ValueError("entries are missing")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(
            f"out: {path} is damaged ({first_line(error)}); remove {folder} to grow anew"
        ) from error
    return found


def _draw(result: GrowthResult, folder: Path) -> None:
    """Draw the growth; a line instead if the library is missing."""
    try:
        require("report", f"no {PICTURE}")
    except UsageError as missing:
        print(missing)
        return
    result.plot(folder / PICTURE)


def _rebuilt(folder: Path, own: OwnFile, inputs: Any, expected: torch.Tensor) -> float:
    """Rebuild the module as a process without Esper would; the difference of its outputs."""
    names: dict[str, Any] = {"__name__": "rebuild"}
    exec(compile((folder / CODE_FILE).read_text(), CODE_FILE, "exec"), names)
    again = names["rebuild"](own.build().cpu(), str(folder / STATE_FILE))
    return difference(expected, outputs(again, inputs))


def _write_programs(
    folder: Path, chosen: GrowthResult, inputs: Any, onnx: Path | None, expected: torch.Tensor
) -> dict[str, float]:
    """Write the exported programs that torch can make; the difference of the outputs of each."""
    try:
        program = exported(chosen.model, inputs)
        content = program.pt2()
    except Exception as error:
        print(f"no {PROGRAM}: torch.export cannot trace the model ({first_line(error)})")
        return {}
    some = inputs
    if program.fixed is not None:
        some = first_samples(inputs, program.fixed, sample_count(inputs))
    differs = {}
    found = _outputs_again(PROGRAM, outputs_of_file, content, some)
    if found is not None:
        if program.fixed is not None:
            print(f"{PROGRAM} takes batches of {program.fixed} alone ({program.reason})")
        replace_synced(folder / PROGRAM, content)
        differs[PROGRAM] = difference(expected[: len(found)], found)
    try:
        require("onnx", f"no {ONNX}", "onnxruntime")
    except UsageError as missing:
        print(missing)
        return differs
    try:
        text = program.onnx()
    except Exception as error:
        print(f"no {ONNX}: torch.onnx cannot write the model ({first_line(error)})")
        return differs
    found = _outputs_again(ONNX, outputs_of_onnx, text, some)
    if found is not None:
        replace_synced(onnx or folder / ONNX, text)
        differs[ONNX] = difference(expected[: len(found)], found)
    return differs


def _outputs_again(
    name: str, read: Callable[[bytes, Any], torch.Tensor], content: bytes, inputs: Any
) -> torch.Tensor | None:
    """The outputs of an exported file, read back; a line instead if it cannot be read or run."""
    try:
        return read(content, inputs)
    except Exception as error:
        print(f"no {name}: the exported file cannot be read back and run ({first_line(error)})")
        return None
