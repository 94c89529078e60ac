"""The gate of code: nothing runs but what this command line, or the user's own program, names.

A run, a policy, records, a grown folder, an evaluation and a file of settings are data. That they
name a plugin or the module of a Gymnasium id permits nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from esper.leyline.config.setting import shown
from esper.leyline.errors import UsageError
from esper.runtime.paths import absolute_path


@dataclass(frozen=True, slots=True)
class Permission:
    """Permission to execute code, which every loader needs; without arguments, for none.

    Only a command makes one, of the flags that were typed, and a function of the Python interface,
    of the settings that its caller gives: ``tests/scripts/test_code_gate.py`` holds the list.

    Attributes:
        files: the Python files of ``--plugin``, ``--model`` and ``--data``.
        gym: the Gymnasium id of ``--gym``.
        trust: ``--trust``, which also permits what data name.
    """

    files: tuple[str, ...] = ()
    gym: str | None = None
    trust: bool = False

    def file(self, path: str, source: str) -> str:
        """The file to execute for the plugin ``path`` that ``source`` names.

        A file of the same name that the user names stands for it: data may come from elsewhere.

        Raises:
            UsageError: it is not permitted.
        """
        equals = [file for file in self.files if _is_same(file, path)]
        namesakes = [file for file in self.files if Path(file).name == Path(path).name]
        for file in (*equals, *namesakes, *([path] if self.trust else [])):
            return file
        raise UsageError(
            f"plugin: {source} names {shown(path)}, which is not executed because data name it; "
            "give --plugin FILE, or --trust if you trust its author"
        )

    def check(self, plugins: Sequence[str], gym: str | None, source: str) -> None:
        """Refuse plugins, or a module of a Gymnasium id, that are not permitted.

        Raises:
            UsageError: see ``file``.
        """
        for path in plugins:
            self.file(path, source)
        if gym is not None and ":" in gym and gym != self.gym and not self.trust:
            raise UsageError(
                f"gym: {source} names {shown(gym)}, whose module is not imported because data "
                "name it; give --gym ID, or --trust if you trust its author"
            )


NOTHING = Permission()
"""Permission for no code: that of a function that reads data."""


def _is_same(file: str, path: str) -> bool:
    try:
        return absolute_path(file) == absolute_path(path)
    except ValueError:  # a null byte, which no file has
        return file == path
