"""Collect the wheels that ``gpu_check.py`` needs on a machine that reaches no package index.

    python scripts/gpu_wheels.py
    python scripts/gpu_wheels.py --python 3.13 --torch 2.12.0 --without numpy scipy pyarrow

Torch itself is never collected: the machine has a build for its driver. ``--without`` leaves out
what else the machine has, the large ones above all. Versions are those of ``constraints.txt``.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
EXTRAS = ("tui",)
"""Extras of the distribution that a section of the check needs: the ticket is about Sanctum."""
TESTS = ("hypothesis", "pytest")
GLIBC = range(5, 40)
"""Minor versions of glibc 2 whose wheels are taken; pip matches each exactly."""
PROCESSOR = "x86_64"


def requirements(torch: str) -> list[str]:
    """Return what the check needs beside torch.

    Raises:
        SystemExit: Esper does not run with that version of torch.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    needs = [Requirement(line) for line in (*project["dependencies"], *extras, *TESTS)]
    (of_torch,) = (need for need in needs if need.name == "torch")
    if torch not in of_torch.specifier:
        print(f"gpu_wheels: --torch: Esper needs torch{of_torch.specifier}", file=sys.stderr)
        raise SystemExit(2)
    return [str(need) for need in needs if need.name != "torch"]


def main() -> int:
    """Download the wheels; return pip's exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default="3.12", help="version of that machine's Python")
    parser.add_argument("--torch", default="2.11.0", help="version of that machine's torch")
    parser.add_argument("--output", type=Path, default=ROOT / "wheels", help="folder")
    parser.add_argument("--without", nargs="+", default=[], metavar="PACKAGE")
    arguments = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", arguments.python):
        parser.error("--python: give a version such as 3.12")
    needs = requirements(arguments.torch)
    platforms = [f"manylinux_2_{minor}_{PROCESSOR}" for minor in reversed(GLIBC)]
    options = [f"--platform={name}" for name in (*platforms, f"manylinux2014_{PROCESSOR}")]
    options += [f"--python-version={arguments.python}", "--implementation=cp"]
    options += ["--only-binary=:all:", f"--constraint={ROOT / 'constraints.txt'}", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(arguments.output)]
    status = subprocess.run([*command, *needs], check=False).returncode
    if status:
        return status
    left_out = {canonicalize_name(name) for name in arguments.without}
    for wheel in sorted(arguments.output.glob("*.whl")):
        if parse_wheel_filename(wheel.name)[0] in left_out:
            wheel.unlink()
    sizes = [wheel.stat().st_size for wheel in arguments.output.glob("*.whl")]
    print(f"{len(sizes)} wheels, {sum(sizes) / 2**20:.0f} MiB, in {arguments.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
