"""Runs commands on hostile folders under an audit hook, in a process of its own: hooks stay.

``python code_audit.py FOLDER all`` tries every case, ``python code_audit.py FOLDER SEED`` a sample,
and prints a ``Report`` as JSON.
"""

import ast
import io
import json
import os
import pickle
import random
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from types import CodeType
from typing import Any, get_args

import laboratory_entry  # noqa: F401

# isort: split

import torch

import esper
import esper_lab
from esper.karn.report import drawing
from esper.leyline.config.offline import ImitationConfig
from esper.leyline.config.setting import about, options_of, settings_of
from esper.leyline.disk import replace_sealed, sealed_json, unsealed_json
from esper.leyline.errors import UsageError
from esper.runtime import plugins
from esper.runtime.gate import Permission
from esper.scripts import completion, grow_model, grow_task, grown_files, runs, tasks
from esper.scripts import main as commands
from esper.scripts.entry import run_guarded
from esper.simic.offline.offline_run import learn_offline
from esper.simic.offline.offline_session import OfflineSession
from esper.simic.run import checkpoint
from esper.simic.training.session import Session
from esper.simic.training.vectorized import train_ppo_vectorized
from esper_lab import ladder
from small_runs import SMALL

TESTS = Path(__file__).parents[1]
MARKER = "run by whoever opens this"
PLUGIN = f"MARKER = {MARKER!r}\n"
MODEL = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))

def loaders():
    batch = torch.randn(8, 4), torch.arange(8) % 2
    return [batch], [batch]
"""
HARMLESS = (("git", "rev-parse", "HEAD"), ("uname", "-p"))
"""Processes that Esper and the standard library start."""
LIBRARIES = {
    os.path.realpath(path)
    for path in (
        *(Path(module.__file__ or "").parent for module in (esper, esper_lab, torch)),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(sys.prefix, sys.base_prefix, TESTS, os.environ.get("ESPER_CACHE_DIR", "~/.cache/esper")),
    )
    for path in [os.path.expanduser(path)]
}


def is_library(path: str) -> bool:
    """Whether a file is Esper's, the interpreter's, of an installed package or of these tests."""
    return any(os.path.realpath(path).startswith(folder + os.sep) for folder in LIBRARIES)


def is_marked(code: Any) -> bool:
    """Whether code, or its source, is that of a hostile file."""
    if isinstance(code, CodeType):
        return any(is_marked(constant) for constant in code.co_consts)
    if isinstance(code, ast.AST):
        return any(
            is_marked(part.value) for part in ast.walk(code) if isinstance(part, ast.Constant)
        )
    text = code.decode(errors="replace") if isinstance(code, bytes) else code
    return isinstance(text, str) and MARKER in text


class Executed(RuntimeError):
    """Code that no one named was about to run."""


@dataclass
class Audit:
    """What the hook sees.

    Attributes:
        named: files and modules that the command line of the case names.
        trusted: whether it has --trust.
        active: whether a case is running.
        seen: what ran without being named.
    """

    named: set[str] = field(default_factory=set)
    trusted: bool = False
    active: bool = False
    seen: list[str] = field(default_factory=list)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """See ``sys.addaudithook``."""
        if not self.active or self.trusted:
            return
        refusal = None
        if event == "exec":
            code = arguments[0]
            refusal = self._of_code(code, code.co_filename)
        elif event == "compile":
            source, name = arguments
            refusal = self._of_code(source, os.fsdecode(name or "<none>"))
        elif event == "import" and arguments[1]:
            refusal = None if is_library(arguments[1]) else arguments[1]
        elif event == "ctypes.dlopen" and os.sep in str(arguments[0]):
            refusal = None if is_library(str(arguments[0])) else arguments[0]
        elif event == "subprocess.Popen":
            words = tuple(map(str, arguments[1]))
            refusal = None if words in HARMLESS or "-dumpversion" in words else words
        elif event in ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"):
            refusal = arguments
        if refusal is not None:
            self.seen.append(f"{event}: {refusal}")
            raise Executed(self.seen[-1])

    def _of_code(self, code: Any, name: str) -> str | None:
        if os.path.realpath(name) in self.named:
            return None
        if os.path.isabs(name):
            return None if is_library(name) else name
        # Text or frozen code: of whoever runs it.
        frame = sys._getframe(2)
        caller = frame.f_code.co_filename
        marked = is_marked(code) and not self.named
        library = caller.startswith("<") or is_library(caller)
        return None if library and not marked else f"{name} by {caller}"


class Reducing:
    """Executes text when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (PLUGIN,)


TRAINING = {
    **{name: value for name, value in SMALL.items() if name != "minibatches"},
    "task": "digits_shift",
    "rounds": 2,
}
IMITATION: dict[str, Any] = {"lstm_hidden": 8, "epochs": 1, "threads": 1, "held_out": 0.0}


def furnish(complete: bool) -> list[str]:
    """Write the hostile files into this folder; what to give as the values of flags.

    Without ``complete``, the runs of several seeds are missing.
    """
    Path("evil.py").write_text(PLUGIN)
    Path("own.py").write_text(MODEL)
    Path("modules").mkdir()
    Path("modules/evil_module.py").write_text(PLUGIN)
    sys.path.append(str(Path("modules").absolute()))
    Path("evil.pkl").write_bytes(pickle.dumps(Reducing()))
    sizes: dict[str, Any] = {**SMALL, "task": "digits_shift", "record": True}
    for name, files in (("honest", []), ("evil", ["evil.py"])):
        train_ppo_vectorized(**sizes, rounds=1, plugin=files, name=name)
    for name in ("honest", "evil"):
        learn_offline(
            ImitationConfig(records=(f"runs/{name}",), name=f"{name}_clone", **IMITATION),
            permission=Permission(trust=True),
        )
    content = json.loads(Path("runs/evil/config.json").read_text())
    for name, settings in (("bare", content["settings"]), ("gym", {"gym": GYM})):
        Path("runs", name).mkdir()
        Path("runs", name, "config.json").write_text(json.dumps(content | {"settings": settings}))
    _pickled(Path(shutil.copytree("runs/honest", "runs/pickled")))
    Path("plugin.json").write_text(json.dumps({**TRAINING, "plugin": ["evil.py"]}))
    Path("gym.json").write_text(json.dumps({"gym": GYM}))
    Path("cifar-10-batches-py").mkdir()
    for i in range(1, 6):
        shutil.copy("evil.pkl", f"cifar-10-batches-py/data_batch_{i}")
    _grown()
    if complete:
        _seeds()
    return [
        *(f"runs/{name}" for name in ("evil", "evil_clone", "bare", "gym", "pickled")),
        *(
            "plugin.json", "gym.json", "evil.pkl", "evil.py", ".", "grown", "unfinished",
            "runs/pair",
        ),
        *("runs/pickled/refused.pt", GYM),
    ]  # fmt: skip


def _pickled(run: Path) -> None:
    """A run whose checkpoint and records are pickles, with the checksums of these."""
    torch.save({"schema": 4, "settings": {}, "agent": Reducing()}, run / "refused.pt")
    evil = (run / "refused.pt").read_bytes()
    for path in run.rglob("*.parquet"):
        shutil.copy("evil.pkl", path)
    (folder,) = (path for path in (run / "checkpoints").iterdir() if path.is_dir())
    fields = unsealed_json((folder / "manifest.json").read_bytes(), checkpoint._SEAL)
    for name in fields["sha256"]:
        (folder / name).write_bytes(evil)
        fields["sha256"][name] = checkpoint._sha256(evil)
        fields["bytes"][name] = len(evil)
    (folder / "manifest.json").write_bytes(sealed_json(fields, checkpoint._SEAL))


def _grown() -> None:
    """Folders of ``esper grow --model``: finished and unfinished, with code and pickles in them."""
    assert run(["grow", *words(GROWN | {"out": "grown"})]) == 0
    Path("grown/rebuild.py").write_text(PLUGIN)
    shutil.copy("runs/pickled/refused.pt", "grown/state_dict.pt")
    shutil.copytree("grown", "unfinished")
    Path("unfinished/result.json").unlink()
    replace_sealed(Path("unfinished/progress.pt"), Path("evil.pkl").read_bytes())


def _seeds() -> None:
    """Runs of two seeds; the first was changed to name another plugin, of equal content."""
    shutil.copy("evil.py", "first.py")
    assert run(["train", "ppo", *words(PAIR | {"rounds": 1})]) == 0
    path = Path("runs/pair/seed-42/config.json")
    path.write_text(path.read_text().replace("first.py", "evil.py"))


QUERY = "SELECT * FROM updates"
PAIR = TRAINING | {"seeds": 2, "name": "pair", "plugin": "first.py"}
GROWN: dict[str, Any] = {"model": "own.py", "epochs": 1, "policy": "never"}
BASES: dict[str, list[dict[str, Any]]] = {
    "train": [TRAINING, PAIR],
    "train imitation": [IMITATION | {"records": "runs/honest"}, IMITATION],
    "train offline": [IMITATION | {"records": "runs/honest", "method": "bc"}, IMITATION],
    "grow": [GROWN | {"out": "new"}, GROWN | {"out": "grown"}, {"task": "digits", "out": "n.pt2"}],
    "evaluate": [{"policy": "never", "suite": "digits", "hosts": 4, "training_hosts": 20}],
    "tasks": [{"describe": "nothing"}, {}],
    "tasks check": [{"file": "own.py"}],
    "query": [{"runs": ["runs/honest", QUERY]}],
}
"""Settings beside the one that is tried, by command; ``train`` is for all that act."""
CODE = ("plugin", "model", "data", "file", "gym")
"""Flags that name code."""


def all_commands() -> Iterator[tuple[str, type]]:
    """Every command and the dataclass of its flags, from the parser's own table."""
    for name in commands.COMMANDS:
        kind = completion.arguments_of(name)
        if isinstance(kind, dict):
            yield from ((f"{name} {one}", of_one) for one, of_one in kind.items())
        else:
            yield name, kind
    yield "tasks check", tasks.CheckArguments
    yield "tasks fetch", tasks.FetchArguments
    yield "runs prune", runs.PruneArguments


def text_flags(kind: type) -> Iterator[str]:
    """The settings of a command that take a path, or a text that could be one."""
    for name, one in settings_of(kind).items():
        options = {part for option in options_of(one.type) for part in (option, *get_args(option))}
        if options & {str, Path}:
            yield name


def words(settings: dict[str, Any], positional: Sequence[str] = ()) -> list[str]:
    """The words of a command line."""
    flags, first = [], []
    for name, value in settings.items():
        values = [str(one) for one in (value if isinstance(value, list) else [value])]
        if name in positional:
            first += values
        else:
            flags += [f"--{name.replace('_', '-')}", *values]
    return first + flags


@dataclass(frozen=True)
class Case:
    """A command line to try.

    Attributes:
        command, flag, value: what gets a hostile value.
        base: number of the settings beside it.
        arguments: the command line.
        code: what it names as code.
    """

    command: str
    flag: str
    value: str
    base: int
    arguments: list[str]
    code: frozenset[str]


def all_cases(
    values: Sequence[str], flags: Callable[[type], Iterable[str]] = text_flags
) -> Iterator[Case]:
    """Every flag of every command with every value."""
    for command, kind in all_commands():
        acts = command.startswith("train ") and command not in BASES
        bases = BASES.get("train" if acts else command, [{}])
        fields = settings_of(kind)
        positional = [name for name, one in fields.items() if about(one).positional]
        for flag, value in product(flags(kind), values):
            # A run or a file with settings of its own is refused with others.
            whole = flag in ("resume", "config_json")
            for i, base in enumerate([*bases, {}] if whole else bases):
                given = {name: x for name, x in base.items() if name in fields}
                given[flag] = [value, QUERY] if (command, flag) == ("query", "runs") else value
                if (command, flag) == ("grow", "task"):
                    given.pop("model", None)
                code = frozenset(str(given[name]) for name in CODE if name in given)
                arguments = [*command.split(), *words(given, positional)]
                yield Case(command, flag, value, i, arguments, code)


def sample(every: list[Case], seed: int) -> list[Case]:
    """Each flag with a run that names a plugin, and half of them with another value."""
    draw = random.Random(seed)
    single = [case for case in every if "--seeds" not in case.arguments]
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in single:
        groups.setdefault((case.command, case.flag), []).append(case)
    certain = [case for case in single if case.value == "runs/evil"]
    others = draw.sample(list(groups.values()), len(groups) // 2)
    return certain + [draw.choice(group) for group in others]


def run(arguments: list[str]) -> int:
    """Call a command silently; its exit status."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as err:
        try:
            return run_guarded(commands.esper, arguments)
        except SystemExit as end:
            return int(end.code or 0)
        except Executed:
            return -1
        finally:
            ERRORS[:] = err.getvalue().splitlines()


@dataclass
class Report:
    """What the test looks at.

    Attributes:
        commands: all commands.
        tried: number of cases.
        executed: what ran without being named.
        refused, lines: commands and flags at which the gate refused, and its lines.
        refused_although_named: cases that it refused although the code was named, or that then ran
            other code.
        unseen: cases that it refused and that ran nothing without a gate.
    """

    commands: list[str]
    tried: int = 0
    executed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    refused_although_named: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


REFUSAL = re.compile("because data name it; give --(plugin FILE|gym ID), or --trust")
GYM = "evil_module:Thing-v0"
ERRORS: list[str] = []
"""What the last command wrote to stderr."""


def enough(*_: Any, **__: Any) -> Any:
    """In place of what takes long: by then, all that a command reads has been read."""
    raise UsageError("enough: the test ends here")


def cut_short() -> None:
    """End training, growth and evaluation where they would begin."""
    Session.run = OfflineSession.run = enough  # type: ignore[method-assign]
    grow_task.grow_on_task = enough
    grow_model.write_files = enough
    ladder.play_controls = ladder.policy_rungs = enough
    tasks._fetch = enough


def take_gate_away() -> None:
    """Permit everything, as if no command asked."""
    Permission.file = lambda self, path, source: path  # type: ignore[method-assign]
    Permission.check = lambda *_: None  # type: ignore[method-assign]


def restored() -> None:
    """Put back hostile files that a command has changed: some write where they are told to."""
    now = {path: path.stat() for path in WRITTEN if path.exists()}
    if {path: (s.st_mtime_ns, s.st_size) for path, s in now.items()} != WRITTEN:
        shutil.rmtree(".", ignore_errors=True)
        shutil.copytree(PRISTINE, ".", dirs_exist_ok=True)


PRISTINE = Path("../pristine")
WRITTEN: dict[Path, tuple[int, int]] = {}
"""Time and size of each hostile file."""


def tried(audit: Audit, arguments: list[str], code: Iterable[str]) -> tuple[int, str, list[str]]:
    """The exit status of a command, its last line on stderr, and what it ran without a name."""
    restored()
    plugins._modules.clear()
    for name in [name for name in sys.modules if name.startswith(("esper_plugin_", "evil_module"))]:
        del sys.modules[name]
    files = [name.partition(":")[0] for name in code]
    audit.named = {os.path.realpath(file) for file in files}
    audit.named |= {os.path.realpath(f"modules/{file}.py") for file in files}
    audit.seen = []
    audit.active = True
    status = run(arguments)
    audit.active = False
    return status, " ".join(ERRORS[-1:]), audit.seen


def main() -> None:
    """Try the cases; those that the gate refuses also with their code named, and without a gate."""
    os.chdir(sys.argv[1])
    torch.set_num_threads(1)
    # Programs and pictures take seconds.
    drawing._svg = lambda *_: ""
    grown_files._write_programs = lambda *_: {}
    complete = sys.argv[2] == "all"
    every = list(all_cases(furnish(complete)))
    shutil.copytree(".", PRISTINE)
    for path in Path().rglob("*"):
        if path.is_file():
            WRITTEN[path] = path.stat().st_mtime_ns, path.stat().st_size
    cut_short()
    audit = Audit()
    sys.addaudithook(audit.hook)
    report = Report(commands=sorted({command for command, _ in all_commands()}))
    refused = []
    for case in every if complete else sample(every, int(sys.argv[2])):
        status, line, seen = tried(audit, case.arguments, case.code)
        report.tried += 1
        report.executed += [f"{shlex.join(case.arguments)}: {each}" for each in seen]
        if REFUSAL.search(line):
            assert status == 2, case
            refused.append((case, line))
    report.refused = sorted({f"{case.command} {case.flag}" for case, _ in refused})
    report.lines = sorted({line for _, line in refused})
    for case, line in refused:
        flag = ["--gym", GYM] if line.startswith("esper: gym:") else ["--plugin", "evil.py"]
        _, line, seen = tried(audit, [*case.arguments, *flag], {*case.code, flag[1]})
        if REFUSAL.search(line) or seen:
            report.refused_although_named.append(f"{shlex.join(case.arguments)}: {line} {seen}")
    take_gate_away()
    for case, _ in refused:
        if not tried(audit, case.arguments, case.code)[2]:
            report.unseen.append(shlex.join(case.arguments))
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
