"""``esper tasks check FILE``: do the user's own tasks or model fit, and what will they cost?"""

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from esper.leyline.config import WorldConfig
from esper.leyline.config.setting import SEEDS, setting, up_to
from esper.leyline.errors import UsageError
from esper.leyline.phases import phase
from esper.own_models.model_check import check as check_model
from esper.own_models.step_cost import duration
from esper.runtime.gate import Permission
from esper.runtime.own_files import LOADERS, MODEL, files_of, find_own, names_function
from esper.runtime.plugins import load, module
from esper.runtime.tasks import TASKS, Task, find_all
from esper.scripts.flags import parse
from esper.simic.tools.task_check import TaskTrial, try_task


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckArguments:
    """Check whether the model or the tasks in a Python file fit Esper, and what they will cost.

    A model is named as for `esper grow --model`: FILE.py:NAME, or FILE.py with `model` and
    `loaders`. At most four samples pass through it at a time; memory and time are predicted, of
    growing it and of training a policy on it.

    Of a task, every blueprint is tried in every slot, then the largest one grows in every slot for
    some steps. If something does not fit, one line gives the reason and the exit status is 2.
    """

    file: str = setting(positional=True)
    """The Python file that defines the tasks, or the model as FILE.py:NAME."""
    data: str | None = None
    """Loaders of the model, FILE.py or FILE.py:NAME; by default `loaders` of its file."""
    loss: str | None = None
    """Loss of the model, see `esper grow`; by default that of its recipe, or cross_entropy."""
    epochs: int = setting(40, up_to(1_000_000))
    """Epochs of growing the model whose time is predicted."""
    split_seed: int = setting(0, SEEDS)
    """Seed of the split into training, validation and test images, for tasks that draw it."""


def check(arguments: list[str]) -> int:
    """Check whether the model or the tasks in a file fit, and what they will cost.

    Raises:
        UsageError: something does not fit, or the file has neither.
    """
    settings = parse(CheckArguments, "esper tasks check", arguments)
    if settings.data is not None or names_function(settings.file):
        return _check_model(settings)
    earlier_names = set(TASKS)
    permission = Permission((settings.file,))
    load(settings.file, permission)
    names = [name for name in TASKS if name not in earlier_names]
    if not names:
        if all(hasattr(module(settings.file, permission), name) for name in (MODEL, LOADERS)):
            return _check_model(settings)
        raise UsageError(
            f"plugin: {settings.file} has no task; write one with @task, or the functions {MODEL} "
            f"and {LOADERS}, or name your model, {settings.file}:NAME"
        )
    console = Console()
    for task in find_all(names):
        with phase(f"trying {task.name}"):
            trial = try_task(task.with_split(settings.split_seed))
        console.print(Text(_lines(task, trial)), soft_wrap=True)
    return 0


def _check_model(settings: CheckArguments) -> int:
    """Check a model of the user's own.

    Raises:
        UsageError: it does not fit; the report says why.
    """
    permission = Permission(files_of(settings.file, settings.data))
    source = find_own(settings.file, settings.data, permission)
    recipe = source.recipe(settings.epochs)
    loaders = source.loaders()
    held_back = {"validation": loaders.validation, "test": loaders.test}
    with phase(f"checking {source.model}"):
        report = check_model(
            source.build(),
            loaders.train,
            epochs=settings.epochs,
            held_back={name: each for name, each in held_back.items() if each is not None},
            **{name: recipe[name] for name in ("slots", "unpack") if name in recipe},
            loss=settings.loss or recipe.get("loss", "cross_entropy"),
        )
    if not report.ok:
        raise UsageError(f"{source.model}: {report.problems[0]}")
    return 0


def _lines(task: Task, trial: TaskTrial) -> str:
    data, world = trial.data, WorldConfig()
    sizes = " / ".join(
        f"{len(labels):,}"
        for labels in (data.train_labels, data.validation_labels, data.test_labels)
    )
    steps = world.rounds * world.envs * task.episode_length
    memory = "not known on this system"
    if trial.bytes is not None:
        mebibytes = trial.bytes / 2**20
        total = f"{world.envs * mebibytes:.0f} MiB for {world.envs}"
        memory = f"{mebibytes:.1f} MiB per environment, {total}"
    lines = [
        ("host", f"{task.host.summary}, {task.host.parameter_count:,} parameters"),
        *(("slot", slot.summary) for slot in task.host.slots),
        ("data", f"{sizes} images {tuple(data.train_images.shape[1:])}, {data.classes} classes"),
        (
            "horizon",
            f"{task.episode_length} steps of {task.max_batches} minibatches of {task.batch_size}",
        ),
        ("tried", f"every blueprint in every slot and style; backend {trial.backend}"),
        ("memory", f"{memory}, with the largest seed in every slot"),
        (
            "time",
            f"{1000 * trial.seconds:.2f} ms per environment step on one thread, "
            f"{duration(steps * trial.seconds)} for {world.rounds} rounds of {world.envs} "
            "environments (without the policy)",
        ),
    ]
    return "\n".join([f"{task.name} fits", *(f"  {name:<9}{value}" for name, value in lines)])
