"""scripts/set_up.sh: what it installs, from where, and what it says, with a fake Python."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = "https://index.example/cpu"
TOOLS = ("bash", "chmod", "cut", "du", "env", "mkdir", "sed")
PIP = """#!/usr/bin/env bash
echo "$@" >> "$LOG"
[[ "$*" != *"$UNREACHABLE"* ]]
"""
PYTHON = """#!/usr/bin/env bash
mkdir -p "$3/bin"
printf '%s' "$PIP" > "$3/bin/python"
chmod +x "$3/bin/python"
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A directory of tools: Linux without an NVIDIA driver."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name))
    executable(tools / "python3", PYTHON)
    executable(tools / "uname", "#!/usr/bin/env bash\necho Linux\n")
    return tools


def set_up(
    machine: Path, index: str = INDEX, unreachable: str = "nothing"
) -> tuple[str, list[str]]:
    """Run the script; return what it printed and the words of each call of pip."""
    log = machine.parent / "log"
    done = subprocess.run(
        [ROOT / "scripts" / "set_up.sh", machine.parent / "venv", "report,tui"],
        env={"PATH": str(machine), "PYTHON": "python3", "PIP": PIP, "LOG": str(log)}
        | {"TORCH_INDEX": index, "UNREACHABLE": unreachable},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, log.read_text().splitlines()


def pinned() -> str:
    (line,) = (
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    return line


def test_without_a_driver_torch_alone_comes_from_the_index_for_cpus(machine: Path) -> None:
    printed, (torch, esper) = set_up(machine)
    assert torch.endswith(f"--no-deps --retries 1 --timeout 30 --index-url {INDEX} {pinned()}+cpu")
    assert esper.endswith("-e .[report,tui]")
    assert INDEX not in esper
    first, last = printed.splitlines()
    assert "about 1.4 GB, with PyTorch for CPUs" in first
    assert " was set up in " in last


def test_where_only_the_package_index_is_reached_it_warns_and_continues(machine: Path) -> None:
    printed, calls = set_up(machine, unreachable=INDEX)
    assert f"PyTorch for CPUs cannot be fetched from {INDEX}" in printed
    assert calls[-1].endswith("-e .[report,tui]")


@pytest.mark.parametrize("case", ["driver", "empty", "other system"])
def test_otherwise_the_package_index_decides(machine: Path, case: str) -> None:
    if case == "driver":
        executable(machine / "nvidia-smi", "#!/usr/bin/env bash\n")
    if case == "other system":
        executable(machine / "uname", "#!/usr/bin/env bash\necho Darwin\n")
    printed, calls = set_up(machine, index="" if case == "empty" else INDEX)
    (esper,) = calls
    assert esper.endswith("-e .[report,tui]")
    assert ("CUDA" in printed) == (case != "other system")


def test_a_failed_installation_is_an_error(machine: Path) -> None:
    with pytest.raises(AssertionError, match="1"):
        set_up(machine, unreachable="report,tui")
