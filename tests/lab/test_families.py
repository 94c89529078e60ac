"""Families: draws by number, their circumstances, and suites of training and held-out draws."""

from collections import Counter
from dataclasses import fields, is_dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency

from esper.karn.runs import inspect
from esper.leyline.actions import BLUEPRINTS, HEADS, Op
from esper.leyline.config import unflatten
from esper.leyline.errors import UsageError
from esper.runtime.data import digits
from esper.runtime.task import HELD_OUT_DRAWS
from esper.runtime.tasks import FAMILIES, SUITES, TASKS, Family, Task, add_family, find, find_all
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.simic.training.vectorized import run_training
from esper.tolaria.bank import StackKey
from esper.tolaria.precision import Precision
from esper_lab.data import IMAGE_KINDS, LABEL_KINDS, Shift, mislabelled
from esper_lab.families import (
    ADAPTATION,
    FROM_SCRATCH,
    ONE_SEED_STEPS,
    PRICES,
    SEQUENCES,
    adaptation,
    one_seed,
)
from small_runs import SMALL, events_of
from support import needs_native

DRAWS = [adaptation(number) for number in range(1200)]


def shifts_of(task: Task) -> tuple[Shift, ...]:
    return () if task.drift is None else task.drift.data.make.args[0]  # type: ignore[attr-defined]


def levels_of(task: Task) -> tuple[str, ...]:
    found = ["input" if shift.kind in IMAGE_KINDS else "output" for shift in shifts_of(task)]
    found += ["features"] if task.drift and task.drift.channels else []
    return tuple(sorted(found))


def circumstances(task: Task) -> tuple:
    drift = task.drift
    window = drift and (drift.earliest, drift.latest, drift.never, drift.channels, task.deadline)
    sample = task.data.make.args  # type: ignore[attr-defined]
    return (task.name, task.price, shifts_of(task), sample, window)


def test_a_draw_depends_on_its_number_alone():
    np.random.seed(1)
    first = [circumstances(adaptation(number)) for number in (17, 3, HELD_OUT_DRAWS)]
    np.random.seed(2)
    again = [circumstances(adaptation(number)) for number in (HELD_OUT_DRAWS, 3, 17)]
    assert first == again[::-1]
    assert len({circumstances(task)[1:] for task in DRAWS}) == len(DRAWS)


DRAWN = {
    "adaptation": "34628ef0df4bfef1",
    "one_seed": "d3f908f5d6ee2f47",
    "from_scratch": "966776e554dae779",
    "sequences": "a56e5d9b3826db4f",
}
"""Digests of the first draws: committed results were measured on these tasks."""


@pytest.mark.parametrize("name", DRAWN)
def test_the_draws_are_those_of_the_committed_results(name: str):
    def plain(value: object) -> object:
        if is_dataclass(value):
            names = [f.name for f in fields(value) if f.name not in ("network", "validation_part")]
            return [plain(getattr(value, name)) for name in names]
        if isinstance(value, partial):
            return [value.func.__name__, *map(plain, value.args), plain(value.keywords)]
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return getattr(value, "__name__", repr(value))

    text = "\n".join(repr(plain(find(f"{name}:{number}"))) for number in range(40))
    assert sha256(text.encode()).hexdigest()[:16] == DRAWN[name]


def test_one_seed_draws_the_shifts_of_adaptation_in_its_first_quarter():
    steps = Counter()
    for own, other in zip(map(one_seed, range(1200)), DRAWS, strict=True):
        assert shifts_of(own) == shifts_of(other)
        assert (own.price, own.deadline, own.max_seeds) == (other.price, other.deadline, 1)
        assert (own.drift is None) == (other.drift is None)
        if own.drift is not None:
            assert own.drift.channels == other.drift.channels
            assert own.drift.earliest == own.drift.latest
            steps[int(own.drift.earliest * ONE_SEED_STEPS)] += 1
    assert set(steps) == set(range(1, 13))
    assert min(steps.values()) > 0.5 * max(steps.values())


def test_a_draw_is_found_by_its_number():
    found = find("adaptation:17")
    assert circumstances(found) == circumstances(adaptation(17))
    assert (found.name, found.family, found.label) == ("adaptation:17",) + 2 * ("adaptation",)
    assert find("digits").label == "digits"


def test_the_suites_are_the_training_and_the_held_out_draws():
    training, held_out = (find_all([name]) for name in ("adaptation", "adaptation_held_out"))
    assert (len(training), len(held_out)) == (128, 256)
    assert [task.name for task in training] == list(SUITES["adaptation"])
    assert [task.name for task in held_out] == list(SUITES["adaptation_held_out"])
    assert not {task.name for task in training} & {task.name for task in held_out}
    assert not {circumstances(t)[1:] for t in training} & {circumstances(t)[1:] for t in held_out}


NO_DRAW = "^task: '{}' is no draw .* adaptation:17$"
NO_TASK = "^task: there is no task '{}'; [^\n]*$"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *((f"adaptation:{number}", NO_DRAW) for number in ("", "x", "-1", "1.5", "9" * 12)),
        *((name, NO_TASK) for name in ("adaptatoin", "adaptation_heldout", "adaption:3")),
        ("unknown:3", NO_TASK),
        ("adaptation", "is a suite; name one of adaptation:0, "),
    ],
)
def test_what_is_no_number_no_family_or_no_task_is_refused_in_one_line(name: str, says: str):
    with pytest.raises(UsageError, match=says.format(name)):
        find(name)


def test_a_family_and_one_of_its_draws_are_no_list_of_tasks():
    with pytest.raises(UsageError, match="'adaptation:3' is given twice"):
        find_all(["adaptation", "adaptation:3"])


def test_the_shares_of_the_circumstances_are_those_of_the_description():
    levels = Counter(levels_of(task) for task in DRAWS)
    assert levels[()] / len(DRAWS) == pytest.approx(0.3, abs=0.05)
    assert sum(n for found, n in levels.items() if len(found) == 2) / len(DRAWS) == pytest.approx(
        0.18, abs=0.05
    )
    for level, share in (("input", 0.13), ("features", 0.23), ("output", 0.16)):
        assert levels[level,] / len(DRAWS) == pytest.approx(share, abs=0.04)
    shifts = [shifts_of(task) for task in DRAWS]
    moves = [task.drift.channels for task in DRAWS if task.drift and task.drift.channels]
    assert {move.block for move in moves} == {0, 1}
    assert 0.3 <= min(move.share for move in moves) < 0.4
    assert 0.9 < max(move.share for move in moves) <= 1.0
    counts = Counter(shift.kind for drawn in shifts for shift in drawn)
    for kinds in (IMAGE_KINDS, LABEL_KINDS):
        assert min(counts[kind] for kind in kinds) > 0.5 * max(counts[kind] for kind in kinds)
    strengths = np.array([shift.strength for drawn in shifts for shift in drawn])
    np.testing.assert_allclose(
        np.quantile(strengths, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.08
    )
    times = np.array([task.drift.earliest for task in DRAWS if task.drift is not None])
    assert 0.0 <= times.min() < 0.05
    assert 0.55 < times.max() <= 0.6
    deadlines = np.array([task.deadline for task in DRAWS])
    np.testing.assert_allclose(np.quantile(deadlines, [0, 0.5, 1]), [0.7, 0.85, 1.0], atol=0.03)
    prices = np.log([task.price for task in DRAWS])
    low, high = np.log(PRICES)
    assert low <= prices.min()
    assert prices.max() <= high
    assert np.median(prices) == pytest.approx((low + high) / 2, abs=0.2)
    labelled = np.array([len(task.datasets()[0].train_labels) for task in DRAWS[:40]])
    assert (labelled >= 80).all()
    assert (labelled < 200).all()
    assert np.ptp(labelled) > 80


def test_a_host_meets_clean_digits_and_the_shift_only_later():
    for task in DRAWS[:40]:
        before, *after = task.datasets()
        assert (before.test_images == digits().test_images).all()
        assert (before.test_labels == digits().test_labels).all()
        assert bool(levels_of(task)) == bool(after)
        if after:
            expected = before
            for shift in shifts_of(task):
                expected = shift.apply(expected)
            assert (after[0].test_images == expected.test_images).all()
            assert (after[0].test_labels == expected.test_labels).all()
            assert task.drift is not None
            assert task.drift.earliest == task.drift.latest
            assert task.drift.never == 0.0


def test_the_hosts_of_a_family_share_a_stack_and_their_pretraining():
    assert len({StackKey.of(task, task.datasets()) for task in DRAWS[:20]}) == 1
    assert len({task.pretraining for task in DRAWS}) == 1
    assert {task.host_learning_rate for task in DRAWS} == {0.0}


@pytest.mark.parametrize("family", [FROM_SCRATCH, SEQUENCES], ids=lambda family: family.name)
def test_layouts_and_data_are_crossed(family: Family):
    """No static feature tells the data, the rate, or whether the data will change."""
    tasks = [family.draw(number) for number in range(1500)]
    hosts = Counter(task.host for task in tasks)
    assert min(hosts.values()) > 0.7 * max(hosts.values())
    for told in (
        lambda task: task.data.make.keywords.get("shift"),
        lambda task: task.data.make.keywords.get("translation"),
        lambda task: task.data.make.args[1] > 0.0,
        lambda task: task.drift is None,
        lambda task: task.learning_rate > 1.4e-2,
    ):
        table = Counter((task.host, told(task)) for task in tasks)
        counts = np.array([[table[h, k] for h in hosts] for k in {k for _, k in table}])
        assert len(counts) == 1 or chi2_contingency(counts).pvalue > 1e-3
    assert {task.decay for task in tasks} == {"cosine"}
    rates = np.log([task.learning_rate for task in tasks])
    assert np.median(rates) == pytest.approx((np.log(5e-3) + np.log(4e-2)) / 2, abs=0.1)


def test_wrong_labels_are_those_of_the_training_split_alone():
    clean, wrong = digits(seed=0), mislabelled(digits, 0.3)
    assert (wrong.train_labels != clean.train_labels).float().mean() == pytest.approx(
        0.27, abs=0.04
    )
    assert wrong.train_images is clean.train_images
    assert wrong.validation_labels is clean.validation_labels
    assert wrong.test_labels is clean.test_labels
    assert mislabelled(digits, 0.3) is wrong
    with pytest.raises(ValueError, match=r"share must lie in \[0, 1\], got 1.5"):
        mislabelled(digits, 1.5)


def test_some_classes_are_all_that_occurs_in_every_split():
    whole, only = digits(seed=3), (5, 6, 7, 8, 9)
    part = mislabelled(digits, 0.0, seed=3, only=only)
    for name in ("train", "validation", "test"):
        labels = getattr(whole, f"{name}_labels").numpy()
        rows = np.isin(labels, only)
        assert np.array_equal(getattr(part, f"{name}_labels").numpy(), labels[rows])
        images = getattr(whole, f"{name}_images").numpy()
        assert np.array_equal(getattr(part, f"{name}_images").numpy(), images[rows])
    assert part.classes == whole.classes == 10
    wrong = mislabelled(digits, 1.0, seed=3, only=only).train_labels
    assert set(wrong.tolist()) == set(only)
    assert (wrong != part.train_labels).float().mean() == pytest.approx(0.8, abs=0.05)


def test_from_scratch_draws_all_classes_or_one_half():
    kept = [FROM_SCRATCH.draw(n).data.make.keywords["only"] for n in range(300)]  # type: ignore[attr-defined]
    shares = Counter(kept)
    assert set(shares) == {None, (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)}
    assert min(shares.values()) > 70
    after = [task.drift for task in map(FROM_SCRATCH.draw, range(300))]
    for only, drift in zip(kept, after, strict=True):
        assert drift is None or drift.data.make.keywords["only"] == only  # type: ignore[attr-defined]


def drawn(number: int) -> Task:
    return replace(find("digits"), name=f"mine:{number}", family="mine")


@pytest.mark.usefixtures("scratch_register")
def test_a_users_own_family_is_registered():
    add_family(Family("mine", "digits", drawn, training=3, held_out=2))
    assert SUITES["mine"] == ("mine:0", "mine:1", "mine:2")
    assert SUITES["mine_held_out"] == ("mine:1000000", "mine:1000001")
    assert find("mine:1").label == "mine"


@pytest.mark.usefixtures("scratch_register")
@pytest.mark.parametrize(
    ("name", "draw", "says"),
    [
        ("digits", drawn, "'digits' is the name of a task or suite"),
        ("suite", drawn, "'suite' is the name of a task or suite"),
        ("adaptation", adaptation, "'adaptation' is the name of a task or suite"),
        ("yours", drawn, "draw 0 of 'yours' is called 'mine:0'"),
        ("mine", lambda n: replace(drawn(n), family=None), "has the family None"),
    ],
)
def test_a_family_with_a_taken_or_wrong_name_is_refused(name: str, draw, says: str):
    before = dict(TASKS), dict(SUITES), dict(FAMILIES)
    with pytest.raises(UsageError, match=f"^family: .*{says}"):
        add_family(Family(name, "mine", draw))
    assert before == (TASKS, SUITES, FAMILIES)


@pytest.mark.parametrize("counts", [{"training": 0}, {"held_out": 0}, {"training": 2_000_000}])
def test_an_invalid_number_of_draws_is_refused(counts: dict):
    with pytest.raises(UsageError, match=f"^{next(iter(counts))}: must lie between 1 and"):
        replace(ADAPTATION, **counts)


def test_a_run_on_a_family_tells_of_one_task(tmp_path: Path):
    more = {"task": "adaptation", "rounds": 2, "envs": 8, "telemetry_dir": str(tmp_path)}
    summary = run_training(unflatten(SMALL | more), "ppo")
    assert (summary.exit_code, len(summary.rounds)) == (0, 2)
    (started,) = events_of(summary.path, "TRAINING_STARTED")
    assert (started["tasks"], started["host_parameters"]) == (["adaptation"], [1860])
    assert started["slots"] == [["r0c0", "r0c1", "r0c2"]]
    for kind in ("EPISODE_STARTED", "EPISODE_OUTCOME"):
        assert [e["task"] for e in events_of(summary.path, kind)] == [["adaptation"] * 8] * 2
    draws = [e["draw"] for e in events_of(summary.path, "EPISODE_STARTED")]
    assert all(name in SUITES["adaptation"] for episode in draws for name in episode)
    assert [len(set(episode)) for episode in draws] == [4, 4]  # groups of two
    assert draws[0] != draws[1]
    assert inspect(summary.path).tasks == ["adaptation"]


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
def test_only_convolutions_grow_in_the_hosts_of_adaptation(backend: str):
    config = GrowthConfig(
        seed=1, episode_length=24, max_batches=1, batch_size=8, group_size=1, backend=backend
    )
    few = replace(adaptation(3).pretraining, steps=2)
    tasks = [replace(adaptation(number), pretraining=few) for number in (3, 4)]
    env = GrowthEnv(tasks, torch.arange(4), config, Precision("cpu"), torch.device("cpu"))
    seen = env.reset(0)
    allowed = seen.masks.kinds.flatten(0, 1).any(0)
    names = {"conv_small", "conv_light", "bottleneck", "conv_heavy"}
    assert {BLUEPRINTS[i] for i in allowed.nonzero().flatten().tolist()} == names
    action = torch.zeros(4, len(HEADS), dtype=torch.long)
    action[:, HEADS.index("op")] = Op.GERMINATE
    for blueprint, grows in (("norm", False), ("conv_light", True)):
        action[:, HEADS.index("blueprint")] = BLUEPRINTS.index(blueprint)
        assert env.step(action).report.success.tolist() == [grows] * 4


@pytest.mark.parametrize("field", ["training", "held_out"])
def test_a_family_has_at_least_one_draw_and_no_more_than_have_numbers(field: str) -> None:
    for count in (1, HELD_OUT_DRAWS):
        assert getattr(Family("many", "digits", adaptation, **{field: count}), field) == count
    for count in (0, HELD_OUT_DRAWS + 1):
        with pytest.raises(UsageError, match=f"^{field}: must lie between 1 and 1000000, got "):
            Family("many", "digits", adaptation, **{field: count})
