"""Loads what examples grew, compares and trains it, in a process that cannot import Esper.

python load_without_esper.py EXAMPLE.py BUILD FOLDER ...   # prints what it found as JSON

BUILD is an expression over the names of the example that makes its model as before it grew. The
folder holds the files of ``GrowthResult.save``, batch.pt (inputs, targets, outputs of the grown
model), and model.pt2 or model.onnx.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# From here on an import of Esper fails.
sys.modules["esper"] = None  # type: ignore[assignment]


def outputs(model: Any, inputs: Tensor) -> Tensor:
    found = model(inputs)
    return found["logits"] if isinstance(found, dict) else found


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    found = outputs(model, inputs)
    if targets.is_floating_point():
        return F.mse_loss(found.flatten(), targets.flatten())
    return F.cross_entropy(found.flatten(0, -2), targets.flatten())


def ran(source: str, path: Path) -> dict[str, Any]:
    """The names that a file defines."""
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(source, path.name, "exec"), names)
    return names


def rebuilt(example: Path, build: str, folder: Path) -> nn.Module:
    """The grown model, in evaluation mode."""
    # To build the model, a user needs the class alone.
    source = re.sub(r"^(import|from) esper\b.*$", "", example.read_text(), flags=re.MULTILINE)
    code = folder / "rebuild.py"
    model = eval(build, ran(source, example))
    rebuild = ran(code.read_text(), code)["rebuild"]
    return rebuild(model, str(folder / "state_dict.pt")).eval()


def programs(folder: Path, inputs: Tensor) -> dict[str, Tensor]:
    """What the exported files compute."""
    found = {}
    if (path := folder / "model.pt2").exists():
        found["pt2"] = outputs(torch.export.load(path).module(), inputs)
    if (path := folder / "model.onnx").exists():
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (given,) = session.get_inputs()
        found["onnx"] = torch.from_numpy(session.run(None, {given.name: inputs.numpy()})[0])
    return found


def report(example: Path, build: str, folder: Path) -> dict[str, Any]:
    """Differences of outputs, and what one training step does."""
    inputs, targets, expected = torch.load(folder / "batch.pt", weights_only=True)
    model = rebuilt(example, build, folder)
    found = {"rebuilt": outputs(model, inputs), **programs(folder, inputs)}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = [float(loss_of(model, inputs, targets))]
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.01)
    loss_of(model, inputs, targets).backward()
    optimizer.step()
    losses.append(float(loss_of(model.eval(), inputs, targets)))
    parameters = dict(model.named_parameters())
    return {
        "differences": {k: float((out - expected).abs().max()) for k, out in found.items()},
        "losses": losses,
        "without gradient": [
            name for name, p in parameters.items() if p.grad is None or not p.grad.isfinite().all()
        ],
        "moved": [name for name, p in parameters.items() if not torch.equal(p, before[name])],
    }


def peak_kib() -> int | None:
    """Peak resident memory; None where the system does not tell."""
    status = Path("/proc/self/status")
    return int(status.read_text().split("VmHWM:")[1].split()[0]) if status.exists() else None


def main() -> None:
    torch.set_num_threads(1)
    given = iter(sys.argv[1:])
    seen = {
        folder: report(Path(example), build, Path(folder))
        for example, build, folder in zip(given, given, given, strict=True)
    }
    imported = [name for name in sys.modules if name.startswith("esper.")]
    print(json.dumps({"seen": seen, "peak": peak_kib(), "imported": imported}))


if __name__ == "__main__":
    main()
