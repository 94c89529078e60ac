"""``esper --completion``: bash completes commands and flags with what it prints."""

import shutil
from pathlib import Path

import pytest

from esper.leyline.config.algorithm import algorithms
from esper.leyline.errors import UsageError
from esper.scripts.completion import SHELLS, arguments_of
from esper.scripts.main import COMMANDS, esper
from esper.scripts.train import CONTROLS
from processes import ran

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p esper | sed -E 's/.*-F ([^ ]+).*/\\1/') esper "${!#}" 2> /dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    """The file that bash sources."""
    path = tmp_path_factory.mktemp("completion") / "esper"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert esper(["--completion", "bash"]) == 0
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], {"train"}),
        (["train", "im"], {"impala", "imitation"}),
        (["train", "ppo", "--group-b"], {"--group-baseline"}),
        (["grow", "--max-p"], {"--max-parameters"}),
    ],
)
def test_bash_offers_commands_and_flags(script: Path, words: list[str], offered: set[str]) -> None:
    done = ran(["bash", "-c", COMPLETE, "bash", str(script), "esper", *words])
    assert done.returncode == 0, done.stderr
    assert {word.strip() for word in done.stdout.split()} == offered


def test_every_command_completes() -> None:
    assert all(arguments_of(command) for command in COMMANDS)
    assert set(arguments_of("train")) == {*algorithms(), *CONTROLS}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_knows_the_flags(shell: str, capsys) -> None:
    assert esper(["--completion", shell]) == 0
    assert "group-baseline" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["bsh"], ["bash", "zsh"]])
def test_another_shell_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="completion: esper --completion takes the name"):
        esper(["--completion", *words])
