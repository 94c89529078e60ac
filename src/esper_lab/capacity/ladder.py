"""The ladder of the suite: a policy of ``esper.grow`` between rules, static networks and sweeps.

The controls ship with Esper (``benchmarks/capacity_ladder.py`` plays them).
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from esper.leyline.disk import DamagedFile, read_sealed_json, replace_sealed_json
from esper.leyline.errors import UsageError
from esper.simic.tools.grow import GrowingPolicy
from esper.tamiyo.baselines import SEARCHES
from esper_lab.capacity import held_out
from esper_lab.capacity.hosts import Host
from esper_lab.capacity.training import FACTORS, Entry, grown, utility
from esper_lab.evaluation import CAPACITY, NEVER_GROW, Evaluation, Rung
from esper_lab.play import OnBatch, digest
from esper_lab.shipped_controls import ShippedControls, difference_text, shipped_controls

FIRST = 300
"""Number of the first fresh host: ``benchmarks/capacity_page.py`` plays those before it."""
REPLAYED_HOSTS = 8
"""Hosts on which never growing is played here too, for controls that were played elsewhere."""
RECORDED = "operations"
"""What entries of earlier versions lack, which are played again."""
PLANS = tuple(f"{factor:g} times as wide" for factor in FACTORS)


def fresh_hosts(count: int) -> list[Host]:
    """The hosts on which everything is scored; an even one is trained from scratch."""
    return [held_out.draw(FIRST + i) for i in range(count)]


def identity(hosts: Sequence[Host]) -> str:
    """What tells controls of these hosts from others."""
    return digest(list(hosts), FACTORS)


def usable_controls(hosts: int) -> ShippedControls:
    """The controls of an evaluation.

    Raises:
        UsageError: they are of fewer hosts, or of others; nothing else plays them.
    """
    controls = shipped_controls(CAPACITY)
    if controls is None or identity(fresh_hosts(controls.hosts)) != controls.identity:
        raise UsageError(
            f"suite: no controls of the suite {CAPACITY} ship with this version; play them by "
            "benchmarks/capacity_ladder.py"
        )
    if hosts > controls.hosts:
        raise UsageError(
            f"hosts: the controls of the suite {CAPACITY} are of {controls.hosts}; give at most as "
            f"many, not {hosts}"
        )
    return controls


def evaluate(
    policy: str,
    count: int,
    controls: ShippedControls,
    work: Path,
    on_batch: OnBatch = lambda stage, done, total: None,
) -> Evaluation:
    """Play a policy on the hosts of the controls.

    Args:
        policy: one that ``esper.grow`` knows.
        count: number of hosts, the first of those of the controls.
        controls: rungs of the same hosts.
        work: directory in which what was played is kept; it is not played again.
        on_batch: see ``OnBatch``.

    Raises:
        UsageError: there is no such policy, or what was played cannot be read.
    """
    hosts = fresh_hosts(count)
    results = entries(policy, hosts, work, partial(on_batch, f"policy {policy}"))
    rungs = controls.first(count)
    operations = rungs[0].operations or []
    rung = rung_of(f"policy, {policy}", results, hosts, operations)
    few = hosts[:REPLAYED_HOSTS]
    never = entries("never", few, work, partial(on_batch, NEVER_GROW))
    replay = rung_of("", never, few, operations[: len(few)])
    return Evaluation(
        policy=policy, suite=CAPACITY, training_hosts=controls.training_hosts,
        tasks=["arrives trained" if host.trained else "from scratch" for host in hosts],
        plans=list(PLANS), rungs=[*rungs, rung], splits=[None] * len(hosts),
        shipped=f"{controls.origin}; {difference_text(replay.utility, rungs[0])}",
        rule_episodes=controls.training_hosts * 2 * len(FACTORS),
        policy_episodes=0 if policy in SEARCHES else GrowingPolicy.named(policy).episodes,
        rents=[host.price for host in hosts],
        training_prices=[host.training_price for host in hosts],
    )  # fmt: skip


def entries(
    policy: str,
    hosts: Sequence[Host],
    work: Path,
    on_host: Callable[[int, int], None] = lambda done, total: None,
) -> list[Entry]:
    """What ``esper.grow`` makes of hosts by a policy; played where ``work`` has no file of it.

    Raises:
        UsageError: there is no such policy, or what was played cannot be read.
    """
    key = policy if policy in SEARCHES else GrowingPolicy.named(policy).identity
    results = []
    for host in hosts:
        path = work / f"{digest(host, key, RECORDED)}.json"
        results.append(kept_entry(path, partial(grown, policy, host)))
        on_host(1, len(hosts))
    return results


def rung_of(
    name: str, entries: Sequence[Entry], hosts: Sequence[Host], operations: Sequence[float]
) -> Rung:
    """The rung of a policy from an entry for each host, of never growing with ``operations``."""
    columns = []
    for one, host, count in zip(entries, hosts, operations, strict=True):
        never = {"parameters": one["host_parameters"], "operations": count}
        columns.append((one, never, (host.price, host.training_price)))
    return Rung(
        name,
        policy=True,
        utility=[utility(*each) for each in columns],
        validation=[utility(*each, "validation") for each in columns],
        added=[float(one["parameters"] - one["host_parameters"]) for one in entries],
        score=[one["test"] for one in entries],
        operations=[one["operations"] for one in entries],
    )


def kept_entry(path: Path, make: Callable[[], Entry]) -> Entry:
    """The entry in ``path``; made and written there if there is none.

    Raises:
        UsageError: the file cannot be read or written.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_sealed_json(path, make())
        return read_sealed_json(path)
    except (OSError, DamagedFile) as error:
        raise UsageError(f"work: cannot keep {path} ({error}); remove the file") from error
