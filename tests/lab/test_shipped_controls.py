"""Shipped controls: the file as it was written, and a replay that notices stale ones.

Schedules without seeds, and seeds in every slot at once, are played on the first hosts again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from esper.leyline.errors import UsageError
from esper.runtime.tasks import Family, add_family, find
from esper_lab import shipped_controls as module
from esper_lab.capacity import ladder
from esper_lab.capacity.training import grown
from esper_lab.controls import ORDERS, controls_identity
from esper_lab.evaluation import CAPACITY, NEVER_GROW, Rung
from esper_lab.hosts import evaluation_hosts
from esper_lab.plans import NEVER, library
from esper_lab.play import Hosts, digest, play_plans
from esper_lab.shipped_controls import (
    ShippedControls,
    shipped_controls,
    shipped_suites,
    write_shipped,
)
from tiny_population import tiny

REPLAYED = 2
TOLERANCE = 0.1
"""Difference in utility of one host that rounding on another processor may make. Between the
backends it is 0.05: hosts that were trained before the episode differ as well."""
SIZE = 300_000


def test_keys_tell_parts_of_the_validation_images_apart() -> None:
    tasks = [replace(find("digits_shift"), validation_part=part) for part in (None, 100, 200)]
    assert len({digest(each) for each in tasks}) == 3


def check(suite: str, controls: ShippedControls) -> None:
    """Play some of the controls again and compare."""
    (whole,) = evaluation_hosts(suite, controls.training_hosts, controls.hosts, 1)
    assert controls.identity == controls_identity(whole, library()), "play them anew"
    fresh = replace(whole.fresh, tasks=whole.fresh.tasks[:REPLAYED], data_seed=ORDERS[0])
    plans = library()
    rungs = {rung.name: rung for rung in controls.rungs}
    everything = rungs["everything at step 0"]
    assert everything.chosen is not None
    planted = plans[everything.chosen[0]]
    assert planted.at_once
    outcome = play_plans(fresh, (NEVER, planted))
    for member, rung in enumerate((rungs[NEVER_GROW], everything)):
        for stored, played in (
            (rung.utility, outcome.test_utility),
            (rung.validation, outcome.validation_utility),
        ):
            expected = np.array(stored[:REPLAYED])
            np.testing.assert_allclose(played[:, member], expected, atol=TOLERANCE)
        assert outcome.added[:, member].tolist() == rung.added[:REPLAYED]


def check_capacity(controls: ShippedControls) -> None:
    """Play some of the controls of the suite ``capacity`` again and compare."""
    hosts = ladder.fresh_hosts(controls.hosts)
    assert controls.identity == ladder.identity(hosts), "play them anew"
    fast = sorted(hosts, key=lambda one: (one.trained, one.epochs * one.samples))
    never = next(rung for rung in controls.rungs if rung.name == NEVER_GROW)
    for host in fast[:REPLAYED]:
        played, place = grown("never", host), hosts.index(host)
        assert never.utility[place] == pytest.approx(played["test"], abs=TOLERANCE)
        assert never.operations[place] == played["operations"]


@pytest.mark.parametrize("suite", shipped_suites())
def test_what_is_shipped_is_what_is_played_today(suite: str):
    controls = shipped_controls(suite)
    assert controls is not None
    if suite == CAPACITY:
        check_capacity(controls)
    else:
        check(suite, controls)
    assert (module.FOLDER / f"{suite}.json.gz").stat().st_size <= SIZE


@contextmanager
def tiny_family() -> Iterator[Hosts]:
    add_family(Family("tiny", "tiny", tiny, training=2, held_out=2))
    (hosts,) = evaluation_hosts("tiny", 20, 4, 1)
    yield hosts


def made(hosts: Hosts) -> ShippedControls:
    """The controls of which ``check`` needs something, played."""
    plans = library()
    scored = replace(hosts.fresh, data_seed=ORDERS[0])
    everything = next(i for i, plan in enumerate(plans) if plan.at_once)
    outcome = play_plans(scored, (NEVER, plans[everything]))
    columns = outcome.test_utility, outcome.validation_utility, outcome.added

    def rung(name: str, member: int, plan: int) -> Rung:
        values = (column[:, member].tolist() for column in columns)
        return Rung(name, False, *values, [plan] * len(hosts.fresh.tasks))

    rungs = [rung(NEVER_GROW, 0, 0), rung("everything at step 0", 1, everything)]
    return ShippedControls(controls_identity(hosts, plans), "made here", 20, 4, rungs)


def test_a_replay_notices_values_and_tasks_that_are_no_longer_played(
    scratch_register: None, monkeypatch
):
    with tiny_family() as hosts:
        controls = made(hosts)
        check("tiny", controls)
        for place in range(2):
            rungs = list(controls.rungs)
            values = [value + 0.12 for value in rungs[place].utility]
            rung = rungs[place]
            rungs[place] = Rung(rung.name, False, values, rung.validation, rung.added, rung.chosen)
            stale = ShippedControls(controls.identity, "", 20, 4, rungs)
            with pytest.raises(AssertionError, match="Not equal to tolerance"):
                check("tiny", stale)
        monkeypatch.setattr("esper_lab.play.RESULTS_VERSION", -1)
        with pytest.raises(AssertionError, match="play them anew"):
            check("tiny", controls)


DRAWS = np.random.default_rng(0)
RUNGS = [
    Rung(name, False, *DRAWS.uniform(size=(3, 7)).tolist(), chosen, DRAWS.uniform(size=7).tolist())
    for name, chosen in (("a", list(range(7))), ("b", None))
]
CONTROLS = ShippedControls("identity", "made here", 20, 7, RUNGS)


def test_the_file_is_small_and_read_as_it_was_written(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(module, "FOLDER", tmp_path / "shipped")
    assert shipped_suites() == []
    assert shipped_controls("mine") is None
    path = write_shipped("mine", CONTROLS)
    first = path.read_bytes()
    assert write_shipped("mine", CONTROLS).read_bytes() == first
    assert shipped_suites() == ["mine"]
    found = shipped_controls("mine")
    assert found is not None
    assert (found.identity, found.origin, found.hosts) == ("identity", "made here", 7)
    for rung, written in zip(found.first(3), RUNGS, strict=True):
        assert rung.chosen == (None if written.chosen is None else [0, 1, 2])
        for column in ("utility", "validation", "added", "score"):
            expected = getattr(written, column)[:3]
            assert getattr(rung, column) == pytest.approx(expected, abs=5.1e-6)
    assert len(found.first(7)[0].utility) == 7


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b cut off"])
def test_a_damaged_file_is_a_usage_error(monkeypatch, tmp_path: Path, content: bytes):
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    write_shipped("mine", CONTROLS)
    (tmp_path / "mine.json.gz").write_bytes(content)
    with pytest.raises(UsageError, match=r"^fresh: cannot read .*mine.json.gz: .*; give --fresh"):
        shipped_controls("mine")
