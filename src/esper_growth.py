"""Entry point of the command ``esper``, outside the package, so that it runs where another package
has taken the import name ``esper``.

PyPI has a package named ``esper``, an entity component system, which installs a package of that
import name too. In one environment, the one installed last replaces ``esper/__init__.py``; beside
an editable installation of Esper, the other one comes first on ``sys.path``.
"""

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution

REINSTALL = "pip install --force-reinstall --no-deps esper-growth"


def main() -> None:
    """Run the command line, or say in one line who has taken the name; exit status 2."""
    taken = taken_name()
    if taken is not None:
        print(f"esper: {taken}", file=sys.stderr)
        sys.exit(2)
    import_module("esper.scripts.main").main()


def taken_name() -> str | None:
    """Say who has taken the import name ``esper``, and what to do; None if it is Esper's."""
    package = import_module("esper")
    if "grow" in getattr(package, "__all__", ()):
        return None
    if namesake_is_installed():
        return (
            "the package esper (an entity component system) has taken the import name esper; "
            f"pip uninstall esper, then {REINSTALL}, or install esper-growth in an environment "
            "of its own"
        )
    if package.__file__ is None:
        return f"esper/__init__.py is missing, as after pip uninstall esper; {REINSTALL}"
    return f"{package.__file__} has taken the import name esper; rename it or move it"


def namesake_is_installed() -> bool:
    """Whether the distribution named ``esper`` is installed, which is not Esper's."""
    try:
        distribution("esper")
    except PackageNotFoundError:
        return False
    return True
