"""``esper.grow``: what the user keeps, tries, frozen parts, the files, the picture."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import esper
from esper.leyline.errors import UsageError
from esper.leyline.stages import Stage
from esper.own_models.growth_picture import STAGE_COLOURS
from esper.own_models.lifecycle_controller import MEANINGS
from esper.own_models.objectives import Evaluator, objective
from grown_modules import germinated, quietly_grown
from own_modules import Gpt, ResidualNet, images, loader, perceptron, table, tokens, unchanged
from support import needs_avx512


def grown(model: nn.Module | None = None, **more: Any) -> esper.GrowthResult:
    torch.manual_seed(0)
    model = ResidualNet() if model is None else model
    return quietly_grown(model, loader(*images(32)), loader(*images(32, 1)), **more)


def test_a_short_training_says_in_how_many_places_seeds_were_tried(capsys) -> None:
    for epochs, line in ((2, "in 0 of 4 places: 2 epochs were too few"), (24, "of 4 places\n")):
        torch.manual_seed(0)
        batches = loader(*images(64)), loader(*images(32, 1))
        esper.grow(ResidualNet(), *batches, epochs=epochs, policy="rule")
        assert line in capsys.readouterr().out


def test_the_result_trains_on_and_its_files_rebuild_it(tmp_path: Path) -> None:
    callbacks: list[esper.EpochRecord] = []
    result = grown(callbacks=[callbacks.append], test_loader=loader(*images(16, 2)), price=0.0)
    assert result.seeds
    assert result.test is not None
    assert callbacks == result.history
    assert any(Stage.FOSSILISED in record.stages.values() for record in result.history)
    assert {n for n in result.model.state_dict() if ".seed." in n}
    bands = result.plot(tmp_path / "growth.svg").axes[2]
    alive = [
        (record.epoch, stage)
        for record in result.history
        for stage in record.stages.values()
        if stage in STAGE_COLOURS
    ]
    assert len(bands.patches) == len(alive)
    assert sorted(bar.get_center()[0] for bar in bands.patches) == sorted(e for e, _ in alive)
    assert "FOSSILISED" in (tmp_path / "growth.svg").read_text()
    folder = result.save(tmp_path / "saved")
    assert {path.name for path in folder.iterdir()} == {"state_dict.pt", "rebuild.py"}
    state = torch.load(folder / "state_dict.pt", weights_only=True)
    again = esper.load_grown(ResidualNet(), state).eval()
    x = images(4, 5)[0]
    assert torch.equal(again(x), result.model.eval()(x))
    before = copy.deepcopy(again.state_dict())
    again.train()(x).square().mean().backward()
    assert all(p.grad is not None for p in again.parameters())
    SGD(again.parameters(), lr=0.1).step()
    assert not torch.equal(again.state_dict()["stem.weight"], before["stem.weight"])


def test_the_same_seeds_give_the_same_result_and_the_module_of_a_cut_short_run_is_clean() -> None:
    one, two = grown(), grown()
    assert unchanged(one.model, two.model.state_dict())
    short = grown(callbacks=[lambda record: record.epoch == 6])
    assert len(short.history) == 6
    assert not any(".seed." in name for name in short.model.state_dict())


def test_a_diverged_try_is_kept_only_if_all_did() -> None:
    rates = iter([float("nan"), 1e-3, 1e-2])
    result = grown(optimizer=lambda p: SGD(p, lr=next(rates)), tries=3, epochs=2, policy="never")
    assert torch.tensor(result.tries[0]).isnan()
    assert result.worth == max(result.tries[1:])
    lost = grown(optimizer=lambda p: SGD(p, lr=float("nan")), tries=2, epochs=1, policy="never")
    assert torch.tensor(lost.worth).isnan()


class ScheduleFree(SGD):
    """Trains other weights than those that are validated; it is told which are wanted."""

    mode = "eval"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def step(self, closure: Any = None) -> Any:
        assert self.mode == "train"
        return super().step(closure)


@pytest.mark.parametrize("policy", ["widen", "rule"])
def test_a_schedule_free_optimizer_is_told_what_is_validated(policy: str) -> None:
    modes: list[str] = []
    optimizers: list[ScheduleFree] = []

    def accuracy(outputs: Tensor, target: Tensor) -> float:
        modes.append(optimizers[0].mode)
        return float((outputs.argmax(1) == target).double().mean())

    def make(parameters: Any) -> ScheduleFree:
        optimizers.append(ScheduleFree(parameters, lr=0.01))
        return optimizers[-1]

    grown(optimizer=make, policy=policy, metric=accuracy, epochs=4)
    assert set(modes) == {"eval"}


def test_a_diverged_twin_is_not_the_better_result() -> None:
    rates = iter([1e-3, float("nan")])
    result = grown(optimizer=lambda p: SGD(p, lr=next(rates)), twin=True, price=0.0)
    assert result.twin is not None
    assert torch.tensor(result.twin.worth).isnan()
    assert result.paid
    assert result.better is result


def test_the_twin_is_trained_by_an_optimizer_with_groups_of_the_module_that_was_passed() -> None:
    model = ResidualNet()
    initial = copy.deepcopy(model)

    def grouped(_: list[nn.Parameter]) -> AdamW:
        head = list(model.head.parameters())
        body = [p for n, p in model.named_parameters() if not n.startswith("head")]
        return AdamW([{"params": head, "lr": 2e-3}, {"params": body, "lr": 1e-3}])

    result = grown(model, optimizer=grouped, twin=True, price=0.0)
    assert result.model is model
    assert result.seeds
    assert result.twin is not None
    assert not result.twin.seeds
    assert result.twin.model is not model

    model = initial
    plain = grown(initial, optimizer=grouped, policy="never")
    assert unchanged(result.twin.model, plain.model.state_dict())


def test_a_module_of_float64_grows_behind_batch_norm_and_activation_functions() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6, 4)),
    ).double()
    data = [(x.double(), y) for x, y in loader(*images(32))]
    result = quietly_grown(model, data, data, epochs=12, price=0.0)
    assert result.seeds
    dtypes = {n: x.dtype for n, x in result.model.state_dict().items() if ".seed." in n}
    assert {d for n, d in dtypes.items() if not n.endswith("recipe")} == {torch.float64}


def test_a_scheduler_that_waits_for_a_plateau_gets_the_metric_that_falls() -> None:
    made: list[ReduceLROnPlateau] = []

    def scheduler(optimizer: Optimizer) -> ReduceLROnPlateau:
        made.append(ReduceLROnPlateau(optimizer))
        return made[0]

    def error(prediction: Tensor, target: Tensor) -> float:
        return float((prediction.argmax(1) != target).float().mean()) + 7.0

    grown(epochs=2, policy="never", scheduler=scheduler, metric=error, higher_is_better=False)
    assert made[0].best >= 7.0


def test_the_best_try_is_kept() -> None:
    results: list[esper.EpochRecord] = []
    result = grown(tries=3, callbacks=[results.append])
    assert len(result.tries) == 3
    assert len(results) == 3 * 16
    best = max(range(3), key=lambda k: result.tries[k])
    assert result.history == results[16 * best : 16 * (best + 1)]
    goal = objective("cross_entropy")
    again = Evaluator(result.model, loader(*images(32, 1)), goal, torch.device("cpu"))()
    assert again == result.validation
    assert result.parameters == sum(p.numel() for p in result.model.parameters())


def test_frozen_parts_and_parts_in_evaluation_mode_stay_as_they_are() -> None:
    model = ResidualNet().train()
    model.layer1.requires_grad_(False).eval()
    model.stem.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    result = grown(model, price=0.0)
    for name, value in before.items():
        if name.startswith(("layer1", "stem")):
            assert torch.equal(model.state_dict()[name], value), name
    assert germinated(result)
    for policy in ("widen", "never"):
        with pytest.raises(UsageError, match="no parameter requires a gradient"):
            grown(ResidualNet().requires_grad_(False), policy=policy)


def test_seeds_grow_beside_a_network_that_is_frozen_as_a_whole() -> None:
    torch.manual_seed(0)
    model = ResidualNet()
    model(images(32, 3)[0])  # statistics of the batch norms
    model.requires_grad_(False)
    before, x = copy.deepcopy(model.state_dict()), images(16, 4)[0]
    outputs = copy.deepcopy(model).eval()(x)
    result = grown(model, price=0.0, epochs=24)
    assert result.seeds
    assert not torch.equal(result.model.eval()(x), outputs)
    assert result.validation.loss < result.history[0].validation.loss
    plain = esper.strip(result.model)
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    assert torch.equal(plain.eval()(x), outputs)


@pytest.mark.parametrize("part", ["inputs", "targets"])
def test_missing_numbers_stop_training_after_an_epoch(part: str) -> None:
    x, y = table(64)
    (x if part == "inputs" else y)[40, 0] = float("nan")
    epochs: list[esper.EpochRecord] = []
    for loaders, name in (
        ((loader(x, y), loader(*table(16))), "train_loader"),
        ((loader(*table(64)), [(x[:32], y[:32]), (x[32:], y[32:])]), "validation_loader"),
    ):
        with pytest.raises(UsageError, match=rf"{name}: the {part} of batch \d+ have NaN"):
            esper.grow(
                nn.Linear(x.shape[1], 1), *loaders, loss="mse", epochs=5, progress=False,
                callbacks=[epochs.append],
            )  # fmt: skip
    assert not epochs


def test_a_label_beyond_the_outputs_and_a_folder_that_cannot_be_written_are_one_line(
    tmp_path: Path,
) -> None:
    x, y = images(64)
    y[50] = 99
    with pytest.raises(UsageError, match=r"validation_loader: a label is outside the 4 classes"):
        quietly_grown(ResidualNet(), [(x[:32], y[:32]), (x[32:], y[32:])], [(x, y)], epochs=2)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="save: cannot write into"):
        grown(epochs=2).save(tmp_path / "file" / "folder")


@needs_avx512
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_mixed_precision_and_channels_last(dtype: torch.dtype | None) -> None:
    model = ResidualNet().to(memory_format=torch.channels_last)
    model.stem.requires_grad_(False)
    model.layer1.requires_grad_(False)
    result = grown(model, amp_dtype=dtype, clip=1.0, price=0.0)
    assert all(p.isfinite().all() for p in result.model.parameters())
    assert germinated(result)


class OwnLoss(nn.Module):
    """Returns its loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Gpt()

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(tokens)["logits"]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def test_dicts_go_in_and_come_out() -> None:
    torch.manual_seed(0)
    text = tokens(32)
    batches = [{"tokens": text[:, :-1], "labels": text[:, 1:]}]
    result = quietly_grown(OwnLoss(), batches, batches, loss="model", epochs=10)
    assert germinated(result)
    first, last = result.history[0].validation, result.validation
    score = 1.0 - last.loss / (first.loss / (1.0 - first.score))
    assert last.score == pytest.approx(score, rel=1e-3)


@pytest.mark.parametrize("policy", ["never", "heuristic", "rule"])
def test_losses_may_lie_below_0(policy: str) -> None:
    torch.manual_seed(0)
    x, y = table(64)

    def likelihood(output: Tensor, target: Tensor) -> Tensor:
        variance = torch.full_like(output, 1e-3)
        return nn.functional.gaussian_nll_loss(0.01 * output, 0.01 * target, variance)

    data = loader(x, y)
    result = quietly_grown(perceptron(), data, data, loss=likelihood, policy=policy)
    first, last = (result.history[i].validation for i in (0, -1))
    assert first.loss < 0.0
    assert last.loss < first.loss
    assert 0.0 <= first.score < last.score < 1.0
    if policy == "rule":
        assert germinated(result)


def test_any_batches_can_be_unpacked_by_a_function() -> None:
    rows = [f"{a:.3f},{b:.3f}" for a, b in zip(*(part[:, 0] for part in table(16)), strict=True)]

    def parse(batch: list[str]) -> tuple[Tensor, Tensor]:
        numbers = torch.tensor([[float(x) for x in row.split(",")] for row in batch])
        return numbers[:, :1], numbers[:, 1:]

    data, how = DataLoader(rows, 8), {"loss": "mse", "unpack": parse}
    result = quietly_grown(perceptron(1), data, data, epochs=2, policy="heuristic", **how)
    assert len(result.history) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tries": 0}, "tries: got 0"),
        ({"tries": 1.5}, "tries: got 1.5; give a whole number, which must lie between 1 and 1000"),
        ({"clip": "1"}, "clip: got '1'; give a number, which must be above 0"),
        ({"seed": -1}, "seed: got -1"),
        ({"slots": "layer1"}, "slots: got the string 'layer1'; give a list of names"),
        ({"loss": "cross"}, "loss: 'cross' is not one of"),
        ({"slots": ["layer9"]}, "slots: ResidualNet has no module 'layer9'"),
        (
            {"policy": "runs/none"},
            "policy: 'runs/none' is neither one of deepen, heuristic, never, rule, widen",
        ),
        ({"optimizer": lambda p: torch.optim.LBFGS(p)}, "LBFGS keeps one state"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_trained(
    change: dict[str, Any], message: str
) -> None:
    model = ResidualNet()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=message):
        grown(model, **change)
    assert unchanged(model, before)


def test_a_line_per_epoch_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    grown(progress=True, epochs=10, optimizer=lambda p: AdamW(p, lr=1e-3))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "slots: layer1.0 (4), layer1.1 (4), layer2.0 (8), layer2.1 (8)"
    assert sum(line.startswith("epoch ") for line in lines) == 10
    assert any(line.startswith("    layer1.0: conv_light germinates") for line in lines)
    # Each word is explained once, below the line that is the first to use it.
    for word, meaning in MEANINGS.items():
        places = [
            i for i, line in enumerate(lines) if word in line and not line.startswith("    (")
        ]
        told = [i for i, line in enumerate(lines) if line == f"    ({word}: {meaning})"]
        assert len(told) == bool(places), word
        if places:
            between = lines[places[0] + 1 : told[0]]
            assert all(line.startswith("    ") for line in between)


def test_a_metric_that_is_not_a_number_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    grown(progress=True, epochs=2, metric=lambda prediction, target: float("nan"))
    lines = capsys.readouterr().out.splitlines()
    assert sum("warning: the validation score is nan" in line for line in lines) == 1


def test_a_check_counts_memory_finds_slots_and_leaves_the_module_alone() -> None:
    torch.manual_seed(0)
    x, y = table(64)
    # Autograd keeps the input of each Linear and the output of each ReLU, here of 32 features.
    model = nn.Sequential(
        nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    )
    before = copy.deepcopy(model.state_dict())
    draw = torch.get_rng_state()
    report = esper.check(model, loader(x, y, batch=32), loss="mse", progress=False)
    assert torch.equal(torch.get_rng_state(), draw)
    assert unchanged(model, before)
    assert not any(p.grad is not None for p in model.parameters())
    assert report.ok, report.problems
    assert [slot.name for slot in report.slots] == ["1", "3"]
    assert (report.batch, report.batches) == (32, 2)
    parameters = sum(p.numel() for p in model.parameters())
    # Prediction and target for the squared error, 4 bytes each; the storage of the whole table.
    activations = report.step.activations
    assert 32 * 64 * 4 <= activations <= 32 * (64 + 16) * 4
    assert report.memory == pytest.approx(4 * 4 * parameters + activations)
    assert report.memory_with_seeds > report.memory
    assert "Sequential fits" in str(report)


def test_a_check_counts_the_classes_of_every_position_whatever_axis_they_are_on() -> None:
    class Positions(nn.Module):
        """Logits ``[B, 3, 7]`` of 7 positions."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 21))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).view(-1, 3, 7)

    x, y = torch.randn(32, 5), torch.randint(3, (32, 7))
    y[20] = 5
    report = esper.check(Positions(), loader(x, y), progress=False)
    assert "a label is 5, but the model has 3 outputs" in "\n".join(report.problems)


def test_a_check_reports_what_is_wrong_with_the_data() -> None:
    x, y = images(65)
    y[:60], y[60:] = 0, 1
    x[70 % 65] = float("nan")
    y[40] = 9
    model = ResidualNet().train()
    before = copy.deepcopy(model.state_dict())
    fine = esper.check(model, loader(*images(32)), progress=False)
    assert fine.ok
    assert fine.step.seconds > 0.0
    assert model.training
    assert unchanged(model, before)
    report = esper.check(model, loader(x, y), progress=False)
    text = "\n".join(report.problems + report.remarks)
    assert "a label is 9, but the model has 4 outputs" in text
    assert "hold NaN or infinite numbers" in text
    assert "a minibatch has one sample" in text
    assert not report.ok
    assert report.class_counts == {0: 59, 1: 5, 9: 1}
    broken = esper.check(perceptron(3), loader(*table(16)), loss="mse", progress=False)
    assert broken.problems[0].startswith("model or loss fails on a batch: mat1 and mat2")
    assert "training step" not in str(broken), "nothing is known of its cost"

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + torch.rand(1)

    found = esper.check(Noisy(), loader(*table(16), batch=4), loss="mse", progress=False)
    assert any("two passes over one batch differ" in remark for remark in found.remarks)
    assert all(f"  remark   {remark}" in str(found).splitlines() for remark in found.remarks)
