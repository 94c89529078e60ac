"""The race of the hot path: who takes part, in which order, and which naive way counts."""

from types import ModuleType

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("scratch_register")


@pytest.fixture
def module(scripts_on_path: None) -> ModuleType:
    import hot_path_race

    return hot_path_race


def small(module: ModuleType, envs: int, **settings: int):
    given = {"episode_length": 3, "max_batches": 1, "telemetry": "off"} | settings
    return module.Workload(envs=envs, **given)


def test_the_fastest_naive_way_of_each_round_counts(module):
    seconds = {
        "ours": np.array([0.1, 0.1, 0.1]),
        "steady": np.array([2.0, 2.0, 2.0]),
        "lucky once": np.array([9.0, 1.0, 9.0]),
    }
    found = module.best_naive(seconds, ["steady", "lucky once"])
    assert found.fastest.tolist() == [2.0, 1.0, 2.0]
    assert found.way == "steady"
    assert found.won == {"steady": 2, "lucky once": 1}


@pytest.mark.parametrize(
    ("envs", "cores", "sizes"),
    [(64, 2, [32, 32]), (24, 2, [8, 16]), (20, 16, [8, 8, 4]), (2, 4, [2])],
)
def test_processes_share_the_environments_in_whole_groups(module, envs, cores, sizes):
    shares = module.shares(small(module, envs), cores)
    assert [share.envs for share in shares] == sizes
    assert [i for share in shares for i in range(share.first, share.first + share.envs)] == [
        *range(envs)
    ]
    assert all(share.threads == 1 for share in shares)


def losses(module: ModuleType, workload, channels_last: bool) -> torch.Tensor:
    loop = module.naive_loop(workload, 1, channels_last)
    loop.begin()
    found = torch.stack([loop.step().report.train_loss for _ in range(workload.episode_length)])
    loop.close()
    return found


def test_the_shares_together_train_the_same_hosts_as_one_process(module):
    whole = small(module, 10)
    parts = [losses(module, share, True) for share in module.shares(whole, 2)]
    torch.testing.assert_close(
        torch.cat(parts, 1), losses(module, whole, False), rtol=1e-4, atol=1e-4
    )


class Logged:
    """A contender that only says what is asked of it."""

    def __init__(self, name: str, log: list[str]):
        self.name, self.log = name, log

    def __getattr__(self, method: str):
        return lambda *given: self.log.append(" ".join([self.name, method, *map(str, given)]))


def test_every_contender_takes_its_turn_in_every_round(module):
    log: list[str] = []
    contenders = {name: Logged(name, log) for name in "ab"}
    seconds = module.race(contenders, small(module, 2, episode_length=13), episodes=2)
    episode = ["a play 10", "b play 10", "a play 3", "a end", "b play 3", "b end"]
    assert log == [
        *("a begin", "b begin", "a play 2", "b play 2"),
        *("a clear", "a begin", "b clear", "b begin", *episode),
        *("a begin", "b begin", *episode),
    ]
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 4, "b": 4}


def test_a_process_that_ends_is_reported(module):
    processes = module.Processes(small(module, 2), 1)
    for process in processes.processes:
        process.terminate()
        process.join()
    with pytest.raises(RuntimeError, match="a naive process ended"):
        processes.call("begin", "NCHW")
    processes.close()
