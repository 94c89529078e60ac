"""Build hook of hatchling that puts the compiled library into a wheel (`make wheel`)."""

import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeLibrary(BuildHookInterface[Any]):
    """Compiles the library for every instruction set and sets the platform tag of the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library and add it to the wheel; called by hatchling."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from esper.native.build import compile_for_a_wheel

        self.place = TemporaryDirectory()
        for path in compile_for_a_wheel(Path(self.place.name)):
            build_data["force_include"][str(path)] = f"esper/native/lib/{path.name}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"], build_data["pure_python"] = f"py3-none-{platform}", False
