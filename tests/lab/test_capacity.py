"""The suite of networks whose width is chosen: its hosts, and a policy of ``grow`` on them."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.wider_layers import parameter_count
from esper.leyline.errors import UsageError
from esper.own_models import layer_growth, new_units
from esper_lab import shipped_controls
from esper_lab.capacity import held_out, ladder, training
from esper_lab.capacity.hosts import VALIDATION, Host, convolutions, perceptron, residual
from esper_lab.evaluate import evaluate
from esper_lab.evaluation import (
    BEST_FIXED,
    CAPACITY,
    CLAIRVOYANT,
    FOREST,
    NEVER_GROW,
    Rung,
    read_evaluation,
)
from esper_lab.shipped_controls import ShippedControls, write_shipped


def small_host(number: int) -> Host:
    """A host that trains for two epochs on 100 samples, an odd one after it was trained."""
    host = held_out.draw(number)
    data = partial(host.data.func, 100, number)  # type: ignore[attr-defined]
    return replace(host, data=data, samples=100, epochs=2, width=3)


@pytest.mark.parametrize("number", [0, 1])
def test_a_policy_that_never_grows_trains_the_host_as_a_plain_loop_does(number: int) -> None:
    host = replace(small_host(number), epochs=6)
    played = training.grown("never", host)
    data, small = training.arrival(host)
    model = training.beginning(host, data, small)
    optimizer = torch.optim.Adam(model.parameters(), lr=training.RATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, host.epochs)
    generator = torch.Generator().manual_seed(1000 + host.seed)
    train = torch.utils.data.TensorDataset(*vars(data.part(slice(100))).values())
    loader = torch.utils.data.DataLoader(train, training.BATCH, shuffle=True, generator=generator)
    model.train()
    for _ in range(host.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    model.eval()
    test = data.part(slice(100 + VALIDATION, None))
    accuracy = (model(test.x).argmax(1) == test.y).double().mean()
    assert played["test"] == pytest.approx(float(accuracy), abs=1e-3)
    size = sum(parameter.numel() for parameter in small.parameters())
    assert played["parameters"] == played["host_parameters"] == size


def test_a_trained_host_has_learned_and_stays_as_it_arrives() -> None:
    host = small_host(1)
    data, small = training.arrival(host)
    untrained = host.build(data)
    accuracies = []
    for model in (untrained, small):
        part = data.part(slice(100))
        accuracies.append(float((model.eval()(part.x).argmax(1) == part.y).double().mean()))
    assert accuracies[1] > accuracies[0] + 0.1
    before = {name: value.clone() for name, value in small.state_dict().items()}
    copy = training.beginning(host, data, small)
    with torch.no_grad():
        next(copy.parameters()).zero_()
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())


def test_a_policy_that_widens_pays_for_what_it_adds_and_for_training_it() -> None:
    host = replace(small_host(0), price=0.0, training_price=0.0, epochs=3)
    played, never = (training.grown(policy, host) for policy in ("widen", "never"))
    size = played["host_parameters"]
    assert played["parameters"] > size
    hosts = [host, replace(host, price=0.1), replace(host, training_price=0.01)]
    rung = ladder.rung_of("", [played] * 3, hosts, [never["operations"]] * 3)
    growth, longer = (np.log(played[name] / never[name]) for name in ("parameters", "operations"))
    costs = np.array([0.0, 0.1 * growth, 0.01 * longer])
    assert min(growth, longer) > 0.0
    assert rung.utility == pytest.approx(played["test"] - costs)
    assert rung.validation == pytest.approx(played["validation"] - costs)
    assert rung.added == [played["parameters"] - size] * 3
    assert training.grown("widen", replace(host, training_price=1.0))["parameters"] == size


def test_a_policy_that_finds_no_place_grows_nothing() -> None:
    host = next(host for host in map(small_host, range(0, 40, 2)) if "reader" in str(vars(host)))
    rule, never = (training.grown(policy, host) for policy in ("rule", "never"))
    assert rule | {"seconds": 0.0} == never | {"seconds": 0.0}


def test_every_drawing_is_another_one() -> None:
    masks = held_out._masks()
    assert masks.shape == (8, 5, 5)
    assert len({mask.tobytes() for mask in masks}) == 8
    assert masks.sum((1, 2)).min() >= 5
    host = next(host for host in map(held_out.draw, range(0, 40, 2)) if host.data_name == "shapes")
    data = host.data()
    means = torch.stack([data.x[-2000:][data.y[-2000:] == kind].mean(0) for kind in range(8)])
    assert torch.pdist(means).min() > 0.1


COUNT = 4


@pytest.fixture
def small_suite(monkeypatch, tmp_path) -> Path:
    """Hosts that train fast, with invented controls."""
    monkeypatch.setattr(ladder, "fresh_hosts", lambda count: list(map(small_host, range(count))))
    monkeypatch.setattr(shipped_controls, "FOLDER", tmp_path / "shipped")
    monkeypatch.chdir(tmp_path)
    draws, zero, costs = np.random.default_rng(0), [0.0] * COUNT, [1e6] * COUNT
    rungs = [
        Rung(name, False, *draws.uniform(size=(2, COUNT)).tolist(), zero, plans, zero, costs)
        for name, plans in (
            (NEVER_GROW, None), (BEST_FIXED, [1] * COUNT), (FOREST, [2] * COUNT),
            (CLAIRVOYANT, [3] * COUNT),
        )
    ]  # fmt: skip
    key = ladder.identity(ladder.fresh_hosts(COUNT))
    write_shipped(CAPACITY, ShippedControls(key, "invented", 20, COUNT, rungs))
    return tmp_path


def command(*more: str, policy: str = "widen", hosts: int = COUNT) -> list[str]:
    return ["--policy", policy, "--suite", "capacity", "--hosts", str(hosts), *more]


def test_the_command_prints_and_keeps_the_ladder_and_goes_on_where_it_was(
    small_suite, capsys, monkeypatch
) -> None:
    assert evaluate(command()) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "policy, widen" in printed
    found = read_evaluation(Path("evaluations/capacity-widen/ladder.json"))
    assert found.tasks == ["from scratch", "arrives trained"] * 2
    assert [rung.name for rung in found.rungs][-1] == "policy, widen"
    hosts = [small_host(number) for number in range(COUNT)]
    played = [training.grown("widen", host) for host in hosts]
    assert found.rungs[-1].score == [one["test"] for one in played]
    assert found.rungs[-1].operations == [one["operations"] for one in played]
    doublings = np.mean([np.log2(one["operations"] / 1e6) for one in played])
    assert f"takes {2**doublings:.1f} times the operations of training of never growing" in printed
    assert found.rents == [host.price for host in hosts]
    assert found.training_prices == [host.training_price for host in hosts]
    never = ladder.rung_of("", [training.grown("never", x) for x in hosts], hosts, [1e6] * COUNT)
    difference = 100 * np.mean(np.subtract(never.utility, found.rungs[0].utility))
    assert f"never growing differs here by {difference:+.1f} points" in printed
    monkeypatch.setattr(ladder, "grown", lambda *_: pytest.fail("it was played again"))
    assert evaluate(command("--out", "again")) == 0
    assert read_evaluation(Path("again/ladder.json")).rungs == found.rungs


def test_a_damaged_file_of_the_work_is_refused_by_name(small_suite) -> None:
    assert evaluate(command(policy="never")) == 0
    file = sorted(Path("evaluations/capacity-stages").glob("*.json"))[0]
    entry = json.loads(file.read_text()) | {"test": 1.0}
    file.write_text(json.dumps(entry, indent=2) + "\n")
    with pytest.raises(UsageError, match=rf"^work: cannot keep .*{file.name} \(its checksum"):
        evaluate(command(policy="never"))


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (command("--members", "2"), "members: the suite capacity does not have it; leave it out"),
        (command("--threads", "2"), "threads: the suite capacity does not have it; leave it out"),
        (command("--fresh"), "fresh: the suite capacity does not have it; leave it out"),
        (command(hosts=5), "hosts: the controls of the suite capacity are of 4; give at most as"),
        (command(policy="wide"), "policy: 'wide' is neither one of"),
        (["--policy", "widen", "--suite", "digits"], " of your own; give --suite capacity"),
    ],
)
def test_what_the_suite_does_not_know_is_refused_before_anything_is_played(
    arguments, refusal, small_suite, monkeypatch
) -> None:
    monkeypatch.setattr(ladder, "grown", lambda *_: pytest.fail("it was played"))
    with pytest.raises(UsageError) as error:
        evaluate(arguments)
    assert refusal in str(error.value)


def test_controls_of_other_hosts_are_not_taken_for_these(small_suite, monkeypatch) -> None:
    def with_another_price(count: int) -> list[Host]:
        first, *rest = map(small_host, range(count))
        return [replace(first, price=first.price / 2), *rest]

    monkeypatch.setattr(ladder, "fresh_hosts", with_another_price)
    with pytest.raises(UsageError, match=r"^suite: no controls of the suite capacity ship"):
        evaluate(command())


@pytest.mark.parametrize("number", [0, 1])
def test_operations_of_never_growing_are_three_times_those_of_its_forward_passes(number) -> None:
    """By a loop over its layers: an LSTM reads with both matrices at each of its eight steps."""
    hosts = map(small_host, range(number, 60, 2))
    host = next(host for host in hosts if "reader" in str(vars(host)))
    _, small = training.arrival(host)
    assert isinstance(small, held_out.Reader)
    lstm, head = small.lstm, small.head
    step = 2 * 4 * lstm.hidden_size * (lstm.input_size + lstm.hidden_size)
    sample = held_out.ROWS * step + 2 * head.in_features * head.out_features
    expected = 3 * sample * host.samples * host.epochs
    assert training.grown("never", host)["operations"] == expected


def test_operations_of_layers_are_those_of_pytorch_s_counter() -> None:
    for make, inputs in ((perceptron, 20), (convolutions, 64), (residual, 64)):
        model, x = make(inputs, 6, 2, 3), torch.randn(5, inputs)
        with FlopCounterMode(display=False) as counter, training.counted_operations() as counts:
            model(x)
            with torch.no_grad():
                before = counter.get_total_flops()
                model(x)
        assert sum(counts) == 3 * before > 0
    x = torch.randn(5, 6, 8)
    with training.counted_operations() as counts:
        nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x)
        nn.Conv1d(6, 4, 3)(x)
    assert counts == [6.0 * 5 * 6 * 4 * 8 * 8, 6.0 * 5 * 4 * 6 * 6 * 3]


def test_growing_costs_the_choice_of_new_units_and_its_trial(monkeypatch) -> None:
    """Of five epochs the first is trained with new units and without, and no other is narrow."""
    choices: list[float] = []

    def watched(*arguments):
        with training.counted_operations() as counts:
            chosen = new_units.propose(*arguments)
        choices.append(sum(counts))
        return chosen

    monkeypatch.setattr(layer_growth, "propose", watched)
    host = replace(small_host(0), price=0.0, epochs=5)
    played, never = training.grown("widen", host), training.grown("never", host)
    data = host.data()
    statics = [host.build(data, factor) for factor in training.FACTORS]
    (wide,) = (each for each in statics if parameter_count(each) == played["parameters"])
    with training.counted_operations() as counts:
        wide(data.x[: host.samples])
    assert sum(counts) > never["operations"] / 5
    assert len(choices) == host.depth
    trained = never["operations"] / 5 + 5 * sum(counts)
    assert played["operations"] == trained + sum(choices)
