"""``esper grow``: grow one network with a policy, and export it to files that run without Esper.

The settings, and which of them belong to a task or to a model of one's own.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from esper.leyline.config.setting import (
    NOT_NEGATIVE,
    POSITIVE,
    SEEDS,
    about,
    meanings,
    setting,
    settings_of,
    up_to,
)
from esper.leyline.errors import UsageError
from esper.own_models.options import GrowOptions, recipe_names
from esper.own_models.options import flags as option_flags
from esper.scripts.flags import parse
from esper.scripts.output import outlive_output

Command = TypeVar("Command")


def with_options(kind: type) -> Callable[[type[Command]], type[Command]]:
    """Add the flags of the options ``kind``, which belong to --model, to a command.

    A flag that is not given leaves an option that a recipe may give to that recipe. Flags that the
    command has itself stay as they are.
    """
    notes = meanings(kind)

    def add(command: type[Command]) -> type[Command]:
        for name, f in option_flags(kind).items():
            if name in command.__annotations__:
                continue
            more, default = about(f), f.default
            if more.in_recipe:
                default = () if more.flag == tuple[str, ...] else None
            meaning = notes[name].partition(". ")[0].removesuffix(".") + ", with --model."
            command.__annotations__ = {**command.__annotations__, name: more.flag}
            setattr(command, name, setting(default, more.within, meaning=meaning))
        return command

    return add


@dataclass(frozen=True, kw_only=True, slots=True)
@with_options(GrowOptions)
class GrowArguments:
    """Grow a network while it trains, and export it to files that run without Esper.

    With --model, train and grow a model of your own: a Python file with a function (or class)
    `model` and a function `loaders` that returns the loaders (train, validation) or
    (train, validation, test). A function `recipe(epochs)` may return further arguments of
    esper.grow. A twin that never grows is trained beside it, and the better one on validation is
    written. Stopped in any way, the same command resumes.

    With --task, grow one fresh host of a task.
    """

    model: str | None = None
    """Your model: FILE.py or FILE.py:NAME."""
    data: str | None = None
    """Its loaders, FILE.py or FILE.py:NAME; by default `loaders` of the file of --model."""
    task: str | None = None
    """Task that the network learns; `esper tasks` lists the tasks."""
    policy: str | None = None
    """The policy: a name of `esper policies`, or a run directory (its latest checkpoint). By
    default widen; with --task, a trained one of `esper policies` that learned on such tasks if
    there is one, else rule."""
    slots: tuple[str, ...] = ()
    """With --model, names of modules behind which seeds may grow; found by default. With --task,
    slots of its host, as in `esper train`; by default those of the policy's run."""
    out: Path | None = None
    """With --model, the folder to write, by default grown/NAME. With --task, the torch.export file
    to write, for example model.pt2."""
    onnx: Path | None = None
    """An ONNX file to write; needs pip install 'esper-growth[onnx]'. With --model, where it is
    installed, model.onnx in the folder by default."""
    seed: int = setting(42, SEEDS)
    """Seed of all random numbers, in [0, 2^32)."""
    name: str | None = None
    """Name of the result, with --model; by default that of the file."""
    seeds: int = setting(1, up_to(1000))
    """Number of seeds from --seed on, with --model: each in a folder of its own, with a joint
    table at the end."""
    optimizer: Literal["adamw", "adam", "sgd"] | None = None
    """Optimizer, with --model; AdamW by default, sgd has momentum 0.9."""
    lr: float | None = setting(None, POSITIVE)
    """Learning rate, with --model; 0.001 by default."""
    weight_decay: float | None = setting(None, NOT_NEGATIVE)
    """Weight decay, with --model; that of torch's optimizer by default."""
    schedule: Literal["constant", "cosine"] | None = None
    """Schedule of the learning rate, with --model; constant by default."""
    keep: bool = False
    """Whether to write the grown network also if growth did not pay, with --model."""
    split_seed: int | None = setting(None, SEEDS)
    """Seed of the split into training, validation and test images, with --task, for tasks that draw
    it; by default that of the policy's run, 0 for a control."""
    greedy: bool | None = None
    """Whether the policy takes its most probable action instead of sampling one, with --task; by
    default a policy that learned from records does, and others sample."""
    plugin: tuple[str, ...] = ()
    """Python files that define your own tasks and blueprints."""
    trust: bool = False
    """Whether plugins may be executed that only the run of --policy names."""


OF_A_TASK = ("split_seed", "greedy")
OF_BOTH = ("policy", "out", "onnx", "seed", "slots", "plugin", "trust")
WHERE = ("model", "data", "task", "out", "onnx", "seed", "name", "seeds", "plugin", "trust")
"""Settings that say what is grown, and where the result goes."""


def grow(arguments: list[str]) -> int:
    """Grow one network with a policy and export it."""
    settings = parse(GrowArguments, "esper grow", arguments)
    outlive_output()
    check_kind(settings)
    # What they import takes seconds.
    if settings.task is None:
        from esper.scripts.grow_model import grow_model

        return grow_model(settings)
    from esper.scripts.grow_task import grow_task

    return grow_task(settings)


def result_settings(settings: GrowArguments) -> dict[str, Any]:
    """The settings with --model on which a result depends, by name."""
    names = [name for name in settings_of(GrowArguments) if name not in (*WHERE, *OF_A_TASK)]
    return {name: getattr(settings, name) for name in names}


def options_of(settings: GrowArguments) -> dict[str, Any]:
    """The options of ``esper.grow`` that flags give: all but those left to a recipe."""
    values = {name: getattr(settings, name) for name in option_flags(GrowOptions)}
    entries = recipe_names(GrowOptions)
    return {name: x for name, x in values.items() if name not in entries or x not in (None, ())}


def check_kind(settings: GrowArguments) -> None:
    """Refuse settings of the other kind of growth.

    Raises:
        UsageError: neither a model nor a task is named, or both; or a setting has no effect.
    """
    if settings.model is not None and settings.task is not None:
        raise UsageError("task: --task and --model contradict each other; give one of them")
    if settings.model is None and settings.task is None:
        raise UsageError(
            "model: esper grow needs --model FILE.py, or --task with a name that `esper tasks` "
            "lists"
        )
    for name, field in settings_of(GrowArguments).items():
        if name in (*OF_BOTH, "model", "task"):
            continue
        default = None if field.default is MISSING else field.default
        if getattr(settings, name) == default:
            continue
        of_task = name in OF_A_TASK
        if of_task != (settings.task is not None):
            flag = "--" + name.replace("_", "-")
            with_, without = ("--task", "--model") if of_task else ("--model", "--task")
            raise UsageError(f"{name}: {flag} belongs to {with_}; omit it with {without}")


def check_writable(name: str, path: Path, suffix: str) -> None:
    """Refuse a file that could not be written after growth.

    Args:
        name: the setting that gives it.
        path: the file.
        suffix: what its name must end in.

    Raises:
        UsageError: the name ends otherwise, or is that of a folder, or in one that does not exist.
    """
    if path.suffix != suffix:
        raise UsageError(f"{name}: {path} must end in {suffix}")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{name}: cannot write {path}; give a file in a folder that exists")
