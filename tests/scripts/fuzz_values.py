"""Right and wrong values for every setting, by its type.

Everything is derived from the fields of ``TrainConfig``, so that a new setting is fuzzed from the
day it exists. What introspection cannot know, the names that a text setting accepts, stands in
``VALID`` and ``INVALID``.
"""

import dataclasses
import random
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from esper.leyline.config import LearnerConfig, TrainConfig, options_of
from esper.runtime.tasks import TASKS

KINDS: dict[str, Any] = {
    f.name: f.type
    for group in dataclasses.fields(TrainConfig)
    for f in dataclasses.fields(group.type)
}
"""The type of every setting, by name."""
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
"""What makes a run short; every case has these unless it sets them otherwise."""

VALID: dict[str, list[Any]] = {
    "task": list(TASKS),
    "slots": ["early", "mid", "late"],
    "device": ["cpu", "cpu:0"],
    "clip": [0.5, 1e30],
    "threads": [1],
    "envs": [1, 2, 3],
    "episode_length": [1, 2, 3],
    "batch_size": [2, 5, 8],
    "lstm_hidden": [1, 4, 8],
    "telemetry_dir": [
        "runs",
        "deep/er",
        "ünï 文",
        "[/x] :smile:",
        "s3:/x",
        " ",
        "-",
        "with\nbreak",
    ],
}
"""Values that work, where the type alone does not tell or would allow what takes long."""

LONG = "x" * 5000
INVALID: dict[str, list[Any]] = {
    "task": ["", "digit_shift", "DIGITS", "../digits", LONG, "digits\n", "\u202edigits", "\x1b[2J"],
    "slots": ["", "r9c9", "middle", "r0c0,r0c1", LONG, "\x00"],
    "device": ["", "toaster", "cuda:99", "meta", "cpu:", "cpu\n", "çpu", LONG, "cuda:-1", "-1"],
    "telemetry_dir": [
        "",
        "file.txt",
        "file.txt/below",
        "/dev/null/x",
        "/proc/nowhere",
        LONG,
        "new/" + LONG,
        "~nosuchuser/x",
        "null\x00byte",
    ],
    "seed": [-1, 2**32],
}
"""Values that must be refused, where the type allows them."""


def valid_value(draw: random.Random, name: str) -> Any:
    """A value that JSON may give ``name``."""
    options = options_of(KINDS[name])
    kind = draw.choice(options)
    if kind is NoneType:
        return SMALL.get(name)
    if get_origin(kind) is tuple:
        assert name in VALID, f"{name} is a new list of names: add it to VALID"
        names = VALID[name]
        return draw.sample(names, draw.randint(1, min(2, len(names))))
    if name in VALID:
        return draw.choice(VALID[name])
    if get_origin(kind) is Literal:
        return draw.choice(get_args(kind))
    simple = {bool: [True, False], int: [1, 2], float: [0.5, 1.0, 1, 1e-30]}
    assert kind in simple, f"{name} is a new setting whose type does not tell: add it to VALID"
    return draw.choice(simple[kind])


def invalid_values(name: str) -> list[Any]:
    """Values that JSON may not give ``name``."""
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
        wrong += [1, True, "early", {"early": 1}, ["early", 1], *([text] for text in own)]
    elif str in options:
        wrong += [1, True, [], ["cpu"], *own]
    else:
        wrong += ["most", "", "PAIRED", 1, True, [], LONG]
    return wrong if NoneType in options else [None, *wrong]


def invalid_texts(name: str) -> list[list[str]]:
    """What may not stand behind the flag of ``name``."""
    options = options_of(KINDS[name])
    own = [str(value) for value in INVALID.get(name, [])]
    if bool in options:
        return [["maybe"], ["true"], [""], ["1", "2"]]
    if any(get_origin(option) is tuple for option in options):
        return [[], *([text] for text in own), [VALID[name][0], own[0]]]
    texts: list[str] = own
    if int in options:
        texts = ["three", "1.5", "", "-1", "1e3", "nan", "9" * 30, "9" * 5000, "0x10", "²", *own]
    elif float in options:
        texts = ["x", "nan", "inf", "-inf", "-1", "", "1e31", "1e999", "1,5", "½", *own]
    elif str not in options:
        texts = ["most", "", "PAIRED", "\x00", LONG]
    return [[], ["1", "2"], *([text] for text in texts)]
