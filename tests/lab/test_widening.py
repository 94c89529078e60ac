"""Wider hosts: nearest in size, of the same kind."""

import pytest
import torch

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.hosts.module import ModuleHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper_lab.baselines import widen

CNN = CnnHost((4, 8), classes=10, image=(8, 8, 1), pools=1, slot_names=("r1c0",))
MLP = MlpHost(widths=(16, 16), classes=10, image=(8, 8, 1))
GPT = TransformerHost(layers=2, width=32, heads=4, context=8)
HOSTS = [CNN, MLP, GPT]


def widths(host: Host) -> tuple[int, ...]:
    if isinstance(host, TransformerHost):
        return (host.width,)
    return host.channels if isinstance(host, CnnHost) else host.widths  # type: ignore[attr-defined]


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.summary)
@pytest.mark.parametrize("times", [0.3, 1.0, 2.0, 3.0, 10.0])
def test_no_other_factor_comes_nearer(host: Host, times: float):
    wanted = round(times * host.parameter_count)
    found = widen(host, wanted)
    assert found is not None
    assert (found.image, found.classes, found.slot_names) == (
        *(host.image, host.classes),
        host.slot_names,
    )
    others = [widen(host, wanted + step * host.parameter_count // 20) for step in range(-5, 6)]
    distance = abs(found.parameter_count - wanted)
    assert distance == min(abs(o.parameter_count - wanted) for o in others if o is not None)
    # Width grows with the root of the parameters, in every block by the same factor.
    factors = [new / old for new, old in zip(widths(found), widths(host), strict=True)]
    assert max(factors) - min(factors) <= 1.0 / min(widths(host))
    assert distance <= 0.2 * wanted


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.summary)
def test_a_host_is_the_widened_host_of_its_own_size(host: Host):
    assert widen(host, host.parameter_count) == host


def test_sizes_are_those_of_the_closed_form():
    found = widen(CnnHost((4, 8), classes=10, image=(8, 8, 1)), 3 * 438)
    assert found is not None
    a, b = widths(found)
    assert found.parameter_count == 9 * a + 9 * a * b + 2 * (a + b) + 10 * b + 10
    assert (a, b) == (8, 15)


def test_the_width_of_a_gpt_stays_a_multiple_of_its_heads():
    found = widen(GPT, 2 * GPT.parameter_count)
    assert isinstance(found, TransformerHost)
    assert (found.heads, found.width % 4) == (4, 0)


def test_a_smaller_size_than_any_gives_one_channel_per_block():
    assert widths(widen(CNN, 1)) == (1, 1)  # type: ignore[arg-type]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


def test_the_width_of_a_users_module_is_unknown():
    assert widen(ModuleHost(Net, 10, (8, 8, 1)), 1000) is None
