"""``esper grow --task``: grow one fresh host of a task, and export it.

A task is played as a policy meets it in training: with its drift, its budget of minibatches and its
deadline, which a loop over loaders does not have.
"""

from esper.leyline.errors import UsageError, first_line
from esper.leyline.notices import notice
from esper.leyline.phases import phase
from esper.runtime.gate import Permission
from esper.runtime.plugins import load
from esper.runtime.tasks import find
from esper.scripts.exported_files import check_exports, write_exports
from esper.scripts.grow import GrowArguments
from esper.simic.tools.grow import SPLITS, GrowingPolicy, Grown, check_file, grow_on_task
from esper.tolaria.export import TOLERANCE, export_program, onnx_bytes, pt2_bytes


def grow_task(settings: GrowArguments) -> int:
    """Grow one host with a policy and export it; the exit status.

    Raises:
        UsageError: a setting is wrong, or a file cannot be written.
    """
    if settings.out is None:
        raise UsageError("out: esper grow --task needs --out FILE.pt2")
    check_exports(settings.out, settings.onnx)
    assert settings.task is not None
    permission = Permission(settings.plugin, trust=settings.trust)
    for path in settings.plugin:
        load(path, permission)
    task = find(settings.task)
    if settings.policy is None:
        policy = GrowingPolicy.trained_on(task)
        print(f"policy: {policy.name}")
    else:
        policy = GrowingPolicy.named(settings.policy, permission)
    split = policy.settings.world.split_seed if settings.split_seed is None else settings.split_seed
    task = task.with_split(split).with_slots(settings.slots or policy.slots_for([task]))
    if policy.trained_on_other_tasks(task):
        task_names = ", ".join(policy.settings.world.task)
        print(f"warning: {policy.name} was trained on {task_names}; on {task.name} it is untested")
    print(f"{task.name}: {task.host.summary}, {task.host.parameter_count} parameters")
    greedy = policy.greedy_by_default if settings.greedy is None else settings.greedy
    grown = grow_on_task(policy, task, settings.seed, greedy)
    _show(grown)
    if not grown.gain > 0.0:
        print(
            "warning: growth did not pay on test: the grown host is written, not its never-grow "
            "twin; --policy never grows nothing"
        )
    with phase("writing the files"):
        return _write(settings, grown)


def _show(grown: Grown) -> None:
    """Print the decisions, the fossilised seeds, the gains and the accuracies."""
    for line in grown.decisions:
        print(f"  {line}")
    seeds = [f"{slot} ({what})" for slot, what in grown.seeds.items()]
    print(f"grown: {'; '.join(seeds) or 'nothing'}, {grown.added} parameters added")
    print(
        f"gain: {_points(grown.gain)} points of test utility over its never-grow twin; "
        f"on validation {_points(grown.validation_gain)}"
    )
    for split in SPLITS:
        accuracy, twin = (
            100 * float(scores[split].accuracy) for scores in (grown.scores, grown.twin_scores)
        )
        print(f"{split} accuracy: {accuracy:.1f} %, its never-grow twin {twin:.1f} %")


def _points(gain: float) -> str:
    """Points with one decimal, without a negative zero."""
    return f"{round(gain, 1) + 0.0:+.1f}"


def _write(settings: GrowArguments, grown: Grown) -> int:
    """Export, compare the export with the host, then write the files; 1 if they differ."""
    try:
        program = export_program(grown.network, grown.task.host.image)
        content = pt2_bytes(program)
        onnx = None if settings.onnx is None else onnx_bytes(program)
    except Exception as error:
        reason = first_line(error)
        raise UsageError(f"out: torch.export cannot export this network ({reason})") from error
    difference = check_file(content, grown)
    if not difference <= TOLERANCE:
        notice(f"esper: the export differs from the host by {difference:.1e}; nothing was written")
        return 1
    assert settings.out is not None
    files = {"out": (settings.out, content)}
    if settings.onnx is not None and onnx is not None:
        files["onnx"] = settings.onnx, onnx
    write_exports(files)
    image, logits = (", ".join(map(str, x.shape[1:])) for x in (grown.images, grown.logits))
    print(
        f"takes images [B, {image}], gives logits [B, {logits}]; "
        f"differs from the host by at most {difference:.1e}"
    )
    return 0
