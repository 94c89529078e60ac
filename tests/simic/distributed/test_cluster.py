"""What is known of a cluster without ray: whether its processes can be reached."""

import pytest

from esper.simic.distributed import cluster as cluster_module
from esper.simic.distributed.cluster import ActorsLost


def test_a_process_is_lost_once_it_has_been_silent_for_too_long(monkeypatch) -> None:
    cluster = object.__new__(cluster_module.Cluster)
    cluster.endpoints = {"the head node": ("one", 1), "this machine": ("two", 2)}
    cluster._contacts = dict.fromkeys(cluster.endpoints, 0.0)
    silent, now = set[str](), [100.0]
    monkeypatch.setattr(cluster_module, "reachable", lambda host, *_, **__: host not in silent)
    monkeypatch.setattr(cluster_module.time, "monotonic", lambda: now[0])
    assert cluster.check()
    silent.add("two")
    now[0] += 30.0
    assert not cluster.check()
    now[0] += 1.0
    with pytest.raises(ActorsLost, match=r"^this machine, two:2, has been unreachable for 31 s"):
        cluster.check()
    silent.clear()
    assert cluster.check()
    assert set(cluster._contacts.values()) == {131.0}
