"""Random command lines and settings files, right and wrong, from a seed."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, get_origin

from fuzz_values import (
    EXCLUSIVE,
    KINDS,
    LEARNER,
    LONG,
    SMALL,
    VALID,
    furnish_plugins,
    invalid_texts,
    invalid_values,
    valid_value,
)

from esper.leyline.config import TrainConfig
from esper.leyline.config.setting import about, options_of, settings_of

ALIASES = {
    name: about(field).aliases
    for name, field in settings_of(TrainConfig).items()
    if about(field).aliases
}
"""Other spellings of settings."""

Mentions = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """One command to type.

    Attributes:
        arguments: arguments after ``esper``.
        expected: the exit status; None when both 0 and 2 are right.
        mentions: one of these must appear in the message of a refusal.
        field: the setting that the case tests, if any.
        content: content of ``settings.json``; None when there is no such file.
    """

    arguments: tuple[str, ...]
    expected: int | None
    mentions: Mentions = ()
    field: str | None = None
    content: bytes | None = None


def spellings(name: str) -> Mentions:
    """Return a setting's name and aliases, as keys and as flags."""
    keys = (name, *ALIASES.get(name, ()))
    return (*keys, *(flag(key) for key in keys))


def flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def written(draw: random.Random, name: str, value: Any) -> list[str]:
    """Return a valid value as flags, written in any of the possible ways."""
    own = flag(draw.choice((name, *ALIASES.get(name, ()))))
    if isinstance(value, bool):
        return [own if value else own.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [own, *value]
    return draw.choice([[own, str(value)], [f"{own}={value}"]])


def flags(draw: random.Random, settings: dict[str, Any]) -> list[list[str]]:
    return [written(draw, name, value) for name, value in settings.items()]


def short_run(draw: random.Random, policy: str, without: str = "") -> dict[str, Any]:
    """Return the settings of a short run plus a random one, never ``without``."""
    taken = {without}.union(*(names for names in EXCLUSIVE if without in names))
    names = [n for n in KINDS if n not in taken and (policy == "ppo" or n not in LEARNER)]
    other = draw.choice(names)
    settings = {**SMALL, other: valid_value(draw, other)}
    return {name: settings[name] for name in names if name in settings}


def commands(count: int, seed: int) -> list[Case]:
    """Command lines."""
    draw = random.Random(seed)
    return _mixed(
        count, (_right_command(draw, name) for name in cycle(KINDS)),
        (_wrong_command(draw, name) for name in cycle(KINDS)), _strange_commands(draw),
        (_wild_command(draw) for _ in cycle([None])),
    )  # fmt: skip


def configs(count: int, seed: int) -> list[Case]:
    """Settings files."""
    draw = random.Random(seed)
    return _mixed(
        count, (_right_config(draw, name) for name in cycle(KINDS)),
        (_wrong_config(draw, name) for name in cycle(KINDS)), _strange_configs(draw),
        (_wild_config(draw) for _ in cycle([None])),
    )  # fmt: skip


def every_wrong_value(seed: int) -> list[Case]:
    """Return cases with each value that must be refused, by flag and by file."""
    draw = random.Random(seed)
    return [
        *(_wrong_command(draw, name, texts) for name in KINDS for texts in invalid_texts(name)),
        *(_config(draw, name, value, 2) for name in KINDS for value in invalid_values(name)),
    ]


def every_named_value(seed: int) -> list[Case]:
    """Return cases with each value of ``VALID``, in a file."""
    draw = random.Random(seed)
    listed = {n for n in VALID if any(get_origin(o) is tuple for o in options_of(KINDS[n]))}
    return [
        _config(draw, name, [value] if name in listed else value, 0)
        for name, values in VALID.items()
        for value in values
    ]


def _mixed(count: int, *kinds: Iterator[Case]) -> list[Case]:
    """Mix right, wrong, strange and wild cases in the proportion 2, 2, 1 and 1."""
    return [next(kinds[kind]) for kind in islice(cycle([0, 1, 2, 0, 1, 3]), count)]


def _policy(draw: random.Random, name: str) -> str:
    return "ppo" if name in LEARNER or draw.random() < 0.7 else "heuristic"


def _right_command(draw: random.Random, name: str) -> Case:
    policy = _policy(draw, name)
    settings = {**short_run(draw, policy, name), name: valid_value(draw, name)}
    words = flags(draw, settings)
    draw.shuffle(words)
    return Case(("train", policy, *chain(*words)), 0, field=name)


def _wrong_command(draw: random.Random, name: str, values: list[str] | None = None) -> Case:
    policy = _policy(draw, name)
    words = flags(draw, short_run(draw, policy, name))
    own = flag(draw.choice((name, *ALIASES.get(name, ()))))
    values = draw.choice(invalid_texts(name)) if values is None else values
    joined = len(values) == 1 and draw.random() < 0.5
    words.append([f"{own}={values[0]}"] if joined else [own, *values])
    draw.shuffle(words)
    return Case(("train", policy, *chain(*words)), 2, spellings(name), name)


RUNS = (
    "missing", "file.txt", "empty", "list", "deep", "texts", "bytes", "no-fingerprint",
    "no-checkpoint", "bad-manifest", "list-manifest", "null\x00byte", "", LONG,
)  # fmt: skip
"""Directories from which no run can be resumed; see ``_furnish_runs``."""


def _strange_commands(draw: random.Random) -> Iterator[Case]:
    """Right except for one thing that is not the value of a setting; or no training at all."""
    runs = cycle(RUNS)
    while True:
        policy = draw.choice(["ppo", "heuristic"])
        small = list(chain(*flags(draw, short_run(draw, policy))))
        train = ("train", policy, *small)
        run = ("train", "ppo", "--resume", "run")
        again, value = draw.choice(
            [("envs", 3), ("rounds", 5), ("episode_length", 9), ("rounds", "x"), ("batch_size", 9)]
        )
        twice = [flag(name) for name in (again, *ALIASES.get(again, (again,)))]
        near = draw.choice(list(KINDS))
        typo = flag(near[: len(near) // 2] + draw.choice("zqk") + near[len(near) // 2 :])
        odd = draw.choice(
            ["--", "---", "--=", "--=3", "--ß", "--" + LONG, "--\x00", "--world.envs"]
        )
        stray = draw.choice(["stray", "-x", "", "-", "\n", LONG, "{}", "ünï", "\udcff"])
        for _ in range(5):
            yield Case((*run[:3], next(runs), "--rounds", "2"), 2, ("resume",))
        yield from [
            Case((*train, typo, "3"), 2, (typo,)),
            Case((*train, twice[0], "4", f"{twice[-1]}={value}"), 2, spellings(again)),
            Case(("train", policy, stray, *small), 2, ("train " + policy,)),
            Case((*train, odd, "3"), 2, (odd.partition("=")[0][:50], "\\x00")),
            Case((*run, "--config-json", "settings.json"), 2, ("resume", "config_json")),
            Case((*run, "--rounds", "2"), 0),
            Case((*run, "--n-episodes=2", "--threads", "None", "--device", "cpu"), 0),
            Case((*run, "--rounds", "1"), 2, ("rounds",)),
            Case((*run, "--rounds", "2", flag("envs"), "2"), 2, ("envs",)),
            Case((*run, "--rounds", "2", "--config-json", "file.txt"), 2, ("config_json",)),
            Case(
                (*train[:2], "--config-json", draw.choice(["", "missing", "empty", LONG])),
                2,
                ("config",),
            ),
            Case(("train", "heuristic", "--resume", "run", "--rounds", "2"), 2, ("--resume",)),
            Case(("train", "heuristic", flag(draw.choice(sorted(LEARNER))), "1"), 2, ("--",)),
            Case((*train, draw.choice(["--help", "-h"])), 0),
            Case(draw.choice([("--help",), ("-h",), ("train", "--help"), ("tasks",)]), 0),
            Case(draw.choice([(), ("train",)]), 2, ("train", "ppo")),
            Case(draw.choice([("trian",), ("",), (LONG,), ("\x00",), ("--train",), ("task",)]), 2),
            Case(("train", draw.choice(["pop", "", "PPO", "--rounds", "ppo "])), 2, ("ppo",)),
            *_lists_of_tasks(draw, policy),
        ]


def _lists_of_tasks(draw: random.Random, policy: str) -> Iterator[Case]:
    """Tasks that cannot train together unless a length is given; plugins together with a run."""
    own = ("train", policy, "--plugin", "own.py", "--task", "own")
    short = ("--rounds", "1", "--envs", "2", "--lstm-hidden", "4")[: 6 if policy == "ppo" else 4]
    tasks = draw.choice([("digits", "digits_long"), ("held_out",), ("suite", "digits_long")])
    yield Case(("train", policy, "--task", *tasks, *short), 2, ("episode_length",))
    yield Case((*own, "digits", *short), 2, ("episode_length", "max_batches", "batch_size"))
    yield Case((*own, *short), 0)
    small = list(chain(*flags(draw, {k: v for k, v in SMALL.items() if k != "lstm_hidden"})))
    yield Case((*own, "digits_long", "--plugin=own.py", *small), 0)
    yield Case((*own, "other", *small), 2, ("task",))
    yield Case((*own[:2], "--task", "own_suite", "--plugin", "own.py", *small), 0)
    yield Case(("train", "ppo", "--resume", "run", "--rounds=2", "--plugin", "own.py"), 0)


def listings(count: int, seed: int) -> list[Case]:
    """Return cases of ``esper tasks``: ``count`` right ones, and every wrong name and plugin."""
    draw = random.Random(seed)
    fine = [(draw.choice(VALID["task"]), draw.choice(VALID["plugin"])) for _ in range(count)]
    odd = ("--nothing", "--\x00", "--plugins=own.py", "--task=digits", "--=3")
    return [
        *(_right_listing(draw) for _ in range(count)),
        *(
            Case(("tasks", *(names or ["nothing"]), "--plugin", *plugins), 2, ("task",))
            for names, (_, *plugins) in zip(invalid_texts("task"), cycle(fine))
        ),
        *(
            Case(("tasks", name, "--plugin", *plugins), 2, ("plugin",))
            for plugins, (name, _) in zip(invalid_texts("plugin"), cycle(fine))
        ),
        *(Case(("tasks", "digits", flag), 2, ("esper tasks", flag)) for flag in odd),
        Case(("tasks", "--plugin", "own.py", "--plugin", "empty.py"), 2, ("plugin",)),
        Case(("tasks", "-x", "digits"), 2, ("task",)),
    ]


def _right_listing(draw: random.Random) -> Case:
    names, plugins = listed(valid_value(draw, "task")), listed(valid_value(draw, "plugin"))
    if draw.random() < 0.5:
        names, plugins = ["own", *names], ["own.py", *plugins]
    return Case(("tasks", *names, "--plugin", *plugins), 0)


def listed(value: Any) -> list[str]:
    """Return a list of names, which JSON may write as one name."""
    return [value] if isinstance(value, str) else list(value)


def _wild_command(draw: random.Random) -> Case:
    """Flags and values in any order, after settings that keep the run short."""
    soup = [flag(draw.choice(list(KINDS))) for _ in range(draw.randint(0, 3))]
    soup += [
        draw.choice(
            ["1", "2", "", "x", "early", "0.5", "-1", "=", "[", "\t", "cpu", "normal", "😀"]
        )
        for _ in range(draw.randint(0, 3))
    ]
    draw.shuffle(soup)
    policy = draw.choice(["ppo", "heuristic"])
    small = list(chain(*flags(draw, short_run(draw, policy))))
    return Case(("train", policy, *small, *soup), None)


def _with_file(draw: random.Random, content: Any, expected: int | None, *rest: Any) -> Case:
    """A case whose settings file has ``content``: bytes, or an object to write as JSON."""
    policy = draw.choice(["ppo", "ppo", "heuristic"])
    encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
    # Plugins that a file names run only with --trust.
    trust = ("--trust",) if b"plugin" in encoded else ()
    words = ("train", policy, "--config-json", "settings.json", *trust)
    return Case(words, expected, *rest, content=encoded)


def _keyed(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings under any of their spellings, in any order."""
    items = [(draw.choice((name, *ALIASES.get(name, ()))), v) for name, v in settings.items()]
    draw.shuffle(items)
    return {draw.choice([key, key.replace("_", "-")]): value for key, value in items}


def _right_config(draw: random.Random, name: str) -> Case:
    return _config(draw, name, valid_value(draw, name), 0)


def _wrong_config(draw: random.Random, name: str) -> Case:
    return _config(draw, name, draw.choice(invalid_values(name)), 2)


def _config(draw: random.Random, name: str, value: Any, expected: int) -> Case:
    settings = {**short_run(draw, "ppo", name), name: value}
    return _with_file(draw, _keyed(draw, settings), expected, spellings(name), name)


def _strange_configs(draw: random.Random) -> Iterator[Case]:
    """A file that is wrong as a whole, or in a key."""
    while True:
        good = short_run(draw, "ppo")
        text = json.dumps(good).encode()
        near = draw.choice(list(KINDS))
        typo = near[: len(near) // 2] + draw.choice("zqk") + near[len(near) // 2 :]
        alias = draw.choice(sorted(ALIASES))
        own = draw.choice(ALIASES[alias])
        contents: list[tuple[Any, Mentions]] = [
            (b"", ("JSON",)),
            (text[:-1], ("JSON",)),
            (text.replace(b":", b"=", 1), ("JSON",)),
            (b"\xff\xfe" + text, ("JSON",)),
            (b"\xef\xbb\xbf" + text, ("JSON",)),
            (json.dumps(good).encode("utf-16"), ("JSON",)),
            (bytes(draw.randrange(256) for _ in range(200)), ("JSON",)),
            (text + text, ("JSON",)),
            (b"\x00" * 100, ("JSON",)),
            (b"[" * 100_000, ("JSON",)),
            (b'{"rounds":' * 100_000, ("JSON",)),
            (b'{"rounds": 1' + b"0" * 10_000 + b"}", ("JSON",)),
            (b'{"rounds": ' + b"[" * 500 + b"]" * 500 + b"}", ("rounds",)),
            (draw.choice([[good], 3, None, "rounds", True, float("nan"), []]), ("object",)),
            ({"settings": good, "fingerprint": {}}, ("settings",)),
            ({"world": good}, ("world",)),
            ({**good, typo: 1}, (typo,)),
            (
                {**good, draw.choice(["", " ", "ünï", "\n", "\x1b[2J", "-", LONG]): 1},
                ("no such setting",),
            ),
            ({**good, "resume": "run"}, ("resume",)),
            ({**good, alias: 1, own: 2}, spellings(alias)),
            (b'{"rounds": 1, "rounds": 2}', ("rounds",)),
            (b'{"rounds": {"a": 1, "a": 2}}', ("a: appears twice",)),
        ]
        for content, mentions in contents:
            yield _with_file(draw, content, 2, mentions)


def _wild_config(draw: random.Random) -> Case:
    """Bytes lost or changed anywhere, except that no number grows."""
    text = bytearray(json.dumps(_keyed(draw, short_run(draw, "ppo"))).encode())
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(text))
        if draw.random() < 0.5:
            text[place] = draw.choice(b' "{}[],:xX\x00\xff\n')
        else:
            del text[place]
    return _with_file(draw, bytes(text), None)


def furnish(place: Path, case: Case) -> None:
    """Write files and directories that get in the way of ``case``."""
    (place / "file.txt").write_text("text")
    (place / "empty").mkdir()
    furnish_plugins(place)
    if case.content is not None:
        (place / "settings.json").write_bytes(case.content)
    if "--resume" in case.arguments:
        _furnish_runs(place)


def _furnish_runs(place: Path) -> None:
    settings = json.dumps({"settings": SMALL, "fingerprint": {}}).encode()
    for name, content in {
        "list": b"[]",
        "deep": b"[" * 100_000,
        "texts": b'{"settings": "a", "fingerprint": "b"}',
        "bytes": b"\xff",
        "no-fingerprint": json.dumps({"settings": SMALL}).encode(),
        "no-checkpoint": settings,
        "bad-manifest": settings,
        "list-manifest": settings,
    }.items():
        (place / name).mkdir()
        (place / name / "config.json").write_bytes(content)
    for name, manifest in {"bad-manifest": "{", "list-manifest": "[]"}.items():
        checkpoint = place / name / "checkpoints" / "000001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(manifest)
