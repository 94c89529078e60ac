"""Right and wrong values for every setting, by its type.

Everything is derived from the fields of ``TrainConfig``, so that a new setting is fuzzed at once.
Names that a text setting accepts cannot be derived; they are listed in ``VALID`` and ``INVALID``.
"""

import dataclasses
import random
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from esper.leyline.config import GymConfig, LearnerConfig, MethodConfig, TrainConfig
from esper.leyline.config.algorithm import AlgorithmConfig
from esper.leyline.config.setting import options_of
from esper.runtime.tasks import SUITES, TASKS, find

KINDS: dict[str, Any] = {
    f.name: f.type
    for group in dataclasses.fields(TrainConfig)
    # Other kinds of run; see tests/simic/gym and tests/simic/impala.
    if group.type not in (GymConfig, AlgorithmConfig, MethodConfig)
    for f in dataclasses.fields(group.type)
}
"""The type of every setting of growing networks, by name."""
LEARNER = {f.name for f in dataclasses.fields(LearnerConfig)}
"""Settings that the heuristic does not have."""

SMALL = {
    "rounds": 1,
    "envs": 1,
    "episode_length": 1,
    "max_batches": 1,
    "batch_size": 4,
    "lstm_hidden": 4,
}
"""Settings that make a run short; every case has these unless it sets them itself."""

OWN_TASK = """
from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime import data
from esper.runtime.tasks import SUITES, Task, task

@task
def NAME():
    host = CnnHost(channels=(2, 2), classes=10, image=(8, 8, 1))
    return Task("NAME", "mine", host, data.digits, 3, 1, 4)

SUITES["NAME_suite"] = ("NAME", "digits")
"""
OWN_BLUEPRINT = """
from esper.kasmina import blueprints
from esper.kasmina.blueprints import conv

blueprints.register("fuzzed", conv.conv_light)
"""
PLUGINS: dict[str, str] = {
    "own.py": OWN_TASK.replace("NAME", "own"),
    "below/other.py": OWN_TASK.replace("NAME", "other") + OWN_BLUEPRINT,
    "ünï 文.py": "print('[/x] :smile:')",
    "empty.py": "",
}
"""Files that every case may load, by their path in its directory."""

TEXTS: dict[str, bytes] = {"text.txt": b"text " * 100, "below/[x] 文": bytes(range(256)) * 2}
"""Texts that every case may learn."""

BROKEN_PLUGINS: dict[str, bytes] = {
    "no.txt": b"", "syntax.py": b"def f(:\n", "nested.py": b"(" * 100_000,
    "bytes.py": b"x = '\xff'\n", "null.py": b"x = 1\x00\n",
    "raises.py": b"raise RuntimeError('\\x1b[2J\\n' + 'x' * 5000)\n",
    "recurses.py": b"def f():\n    f()\n\nf()\n", "exits.py": b"raise SystemExit(0)\n",
    "taken.py": OWN_TASK.replace("NAME", "digits").encode(),
    "named_as_suite.py": OWN_TASK.replace("NAME", "held_out").encode(),
    "half.py": (OWN_TASK.replace("NAME", "half") + "raise ValueError\n").encode(),
    "blueprint.py": OWN_BLUEPRINT.replace("fuzzed", "conv_light").encode(),
}  # fmt: skip
"""Files that no case may load."""

VALID: dict[str, list[Any]] = {
    # The data of the others are not part of Esper.
    "task": [name for name in [*TASKS, *SUITES] if not name.startswith("cifar")],
    "data_dir": ["data", "ünï 文", "", "nowhere/else", "-"],
    "plugin": [*PLUGINS, "./own.py", "~/own.py", "link.py", "below/../own.py"],
    "text_file": [*TEXTS, "./text.txt", "below/../text.txt"],
    "slots": ["early", "mid", "late"],
    "device": ["cpu", "cpu:0"],
    "devices": ["cpu", "cpu:0"],
    "clip": [0.5, 1e30],
    "compile": ["auto", "off"],
    "threads": [1],
    "auto_advance": ["g1", "g2", "g3"],
    "reward_options": ["rent_floor=200", "shaping=0", "accuracy_weight=2.5"],
    "entropy_per_head": ["op=2", "slot=0", "tempo=1.5"],
    "envs": [1, 2, 3],
    "episode_length": [1, 2, 3],
    "batch_size": [2, 5, 8],
    "lstm_hidden": [1, 4, 8],
    "record_last": [None],  # a number needs --record
    "wandb": [False],  # needs events
    "group_baseline": [None, False],  # needs groups of at least two environments
    "initial_policy": [None],  # another needs a trained run
    "name": ["mine", "ünï_文", "a.b+c-1", "x" * 60],
    "telemetry_dir": [
        "runs", "deep/er", "ünï 文", "[/x] :smile:", "s3:/x", " ", "-", "with\nbreak",
    ],
}  # fmt: skip
"""Valid values of settings whose type does not determine them, or allows slow runs."""

EXCLUSIVE = (
    {"lr_warmup_frac", "lr_warmup_steps"},
    {"lr_adaptive_kl", "lr_decay"},
    {"amp_policy", "amp_dtype"},
    {"device", "devices"},
    {"gpu_preload", "experimental_gpu_preload_gather"},
)
"""Settings of which some values contradict each other, or need a CUDA device."""

LONG = "x" * 5000
INVALID: dict[str, list[Any]] = {
    "auto_advance": ["", "g0", "g5", "g", "\x1b[2J", LONG],
    "reward_options": ["", "budget=1", "shaping", "shaping=", "shaping=-1", "shaping=nan", LONG],
    "entropy_per_head": ["", "hat=1", "op", "op=x", "op=1e9", "op=inf", LONG],
    "task": [
        *("", "digit_shift", "DIGITS", "../digits", LONG, "digits\n", "\u202edigits", "\x1b[2J"),
        *("ownn", "held-out", "own.py"),
        *(["digits", "digits"], ["suite", "digits"], ["held_out", "held_out"], ["digits"] * 5000),
    ],
    "plugin": [
        *BROKEN_PLUGINS,
        *("", "missing.py", "own", "own.PY", "empty", "folder.py", "loop.py", "own.py/x.py"),
        *("/dev/null", "~nosuchuser/own.py", "null\x00byte.py", LONG, LONG + ".py", "-", "\x1b.py"),
        ["own.py", "own.py", "missing.py"],
    ],
    "text_file": [
        *("", "missing", "empty", "empty.py", "file.txt", "loop.py", "own.py/x", "/dev/zero"),
        *("null\x00byte", "~nosuchuser/text", LONG, "-", "\x1b[2J"),
    ],
    "initial_policy": [
        *("", "missing", "own.py", "file.txt/below", "empty", "loop.py", "/dev/null", "-"),
        *("~nosuchuser/run", "null\x00byte", LONG, "new/" + LONG, "\x1b[2J"),
    ],
    "slots": ["", "r9c9", "middle", "r0c0,r0c1", LONG, "\x00"],
    "devices": ["", "toaster", "meta", ["cpu", "cuda:99"], ["cpu", "cpu:"], LONG],
    "device": ["", "toaster", "cuda:99", "meta", "cpu:", "cpu\n", "çpu", LONG, "cuda:-1", "-1"],
    "name": [
        *("", ".", "..", "a/b", "/tmp", ".hidden", "-1", " x", "two words", "x\n", "[/x]"),
        *("null\x00byte", "\x1b[2J", "x" * 61, LONG),
    ],
    "telemetry_dir": [
        "", "file.txt", "file.txt/below", "/dev/null/x", "/proc/nowhere", LONG, "new/" + LONG,
        "~nosuchuser/x", "null\x00byte",
    ],
    "seed": [-1, 2**32],
}  # fmt: skip
"""Values that must be refused, where the type allows them."""


def valid_value(draw: random.Random, name: str) -> Any:
    """Return a valid JSON value for ``name``."""
    options = options_of(KINDS[name])
    kind = draw.choice(options)
    if kind is NoneType:
        return SMALL.get(name)
    if get_origin(kind) is tuple:
        assert name in VALID, f"{name} is a new list of names: add it to VALID"
        return _valid_names(draw, name)
    if name in VALID:
        return draw.choice(VALID[name])
    if get_origin(kind) is Literal:
        return draw.choice(get_args(kind))
    simple = {bool: [True, False], int: [1, 2], float: [0.5, 1.0, 1, 1e-30]}
    assert kind in simple, f"{name} is a new setting whose type does not tell: add it to VALID"
    return draw.choice(simple[kind])


def _valid_names(draw: random.Random, name: str) -> list[str] | str:
    """A name, or a list of one or two."""
    first = draw.choice(VALID[name])
    if draw.random() < 0.3:
        return first
    others = [v for v in VALID[name] if name != "task" or _go_together(first, v)]
    return [first, *draw.sample(others, draw.randint(0, min(1, len(others))))]


def _go_together(one: str, other: str) -> bool:
    """Whether two tasks or suites have no task in common, and the same limit of seeds."""
    own, others = (SUITES.get(name, (name,)) for name in (one, other))
    same_limit = find(own[0]).max_seeds == find(others[0]).max_seeds
    return same_limit and {one, *own}.isdisjoint({other, *others})


def invalid_values(name: str) -> list[Any]:
    """Return invalid JSON values for ``name``."""
    options = options_of(KINDS[name])
    wrong: list[Any] = [{}, {"a": {"b": [1]}}, [[1]], [None], -1.5, float("inf"), float("nan")]
    own = INVALID.get(name, [])
    if int in options:
        wrong += ["3", "", 1.5, True, -1, 10**30, 10**4000, [], *own]
    elif float in options:
        wrong += ["0.5", "", True, -1, 1e31, 10**400, -float("inf"), [], *own]
    elif bool in options:
        wrong += [0, 1, "true", "", []]
    elif any(get_origin(option) is tuple for option in options):
        texts = [text for text in own if isinstance(text, str)]
        wrong += [1, True, {"early": 1}, ["early", 1], *own, *([text] for text in texts)]
    elif str in options:
        wrong += [1, True, [], ["cpu"], *own]
    else:
        wrong += ["most", "", "PAIRED", 1, True, [], LONG]
    # Null is the default that a file of the prior system has for its task.
    return wrong if NoneType in options or name == "task" else [None, *wrong]


def invalid_texts(name: str) -> list[list[str]]:
    """Return invalid texts for the flag of ``name``."""
    options = options_of(KINDS[name])
    if bool in options:
        return [["maybe"], ["true"], [""], ["1", "2"]]
    if any(get_origin(option) is tuple for option in options):
        listed = [[value] if isinstance(value, str) else value for value in INVALID[name]]
        return [[], *listed, [VALID[name][0], *listed[0]]]
    own = [str(value) for value in INVALID.get(name, [])]
    texts: list[str] = own
    if int in options:
        texts = ["three", "1.5", "", "-1", "1e3", "nan", "9" * 30, "9" * 5000, "0x10", "²", *own]
    elif float in options:
        texts = ["x", "nan", "inf", "-inf", "-1", "", "1e31", "1e999", "1,5", "½", *own]
    elif str not in options:
        texts = ["most", "", "PAIRED", "\x00", LONG]
    return [[], ["1", "2"], *([text] for text in texts)]


def furnish_plugins(place: Path) -> None:
    """Write the files that ``VALID`` and ``INVALID`` name under ``plugin`` and ``text_file``."""
    (place / "below").mkdir()
    (place / "folder.py").mkdir()
    for name, source in PLUGINS.items():
        (place / name).write_text(source, encoding="utf-8")
    for name, content in (BROKEN_PLUGINS | TEXTS).items():
        (place / name).write_bytes(content)
    (place / "link.py").symlink_to("own.py")
    (place / "loop.py").symlink_to("loop.py")
