"""The functions of a step as graphs that inductor compiles: what ``bookkeeping.py`` measures.

Dynamo cannot read the functions themselves (it takes a tensor compared with a member of an
``IntEnum`` for False), so that they are traced by ``make_fx`` or ``torch.export`` first. Fields lie
in blocks, as for the library of ``simic.native``: every tensor that is handed over costs a check.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from esper.kasmina.lifecycle import Rules, apply
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.leyline.stages import Stage
from esper.simic.native.blocks import Blocks, CutSignals, CutState
from esper.simic.native.interface import AMOUNTS, FLAGS, NUMBERS, SIGNAL_FLAGS, SIGNALS
from esper.simic.step_functions import Acted, Features, Passed, TorchStep
from esper.tamiyo.policy.features import Progress
from esper.tolaria.backends import EpochResult, Scores
from esper.tolaria.engine import Engine, Measurement
from esper.tolaria.governor import Governor, Limits

TOLERANCE = 1e-6
SEEDS, MEASURED = (NUMBERS, AMOUNTS, FLAGS), (SIGNALS, SIGNAL_FLAGS)

Graph = Callable[..., Sequence[Tensor]]
Make = Callable[[Graph, tuple[Tensor, ...], str], Graph]


def joined(record: SeedState | SeedSignals, names: Sequence[Sequence[str]]) -> Blocks:
    """The fields of a record in blocks."""
    if isinstance(record, CutState | CutSignals):
        return record.blocks
    return tuple(torch.stack([getattr(record, name) for name in part]) for part in names)


def parted(kind: type, names: Sequence[Sequence[str]], blocks: Sequence[Tensor]):
    """The inverse of ``joined``."""
    pairs = zip(names, blocks, strict=True)
    return kind(**{n: x for part, b in pairs for n, x in zip(part, b.unbind(), strict=True)})


class Flat:
    """The functions of ``TorchStep`` from tensors to tensors."""

    def __init__(self, step: TorchStep):
        self.step = step

    def act(self, *tensors: Tensor) -> Blocks:
        state, (actions, legal) = parted(SeedState, SEEDS, tensors[:3]), tensors[3:]
        acted, success = apply(state, actions, legal, self.step.kinds)
        moved = acted.stage != state.stage
        ends = [moved & (acted.stage == stage) for stage in (Stage.GERMINATED, Stage.FOSSILISED)]
        return *joined(acted, SEEDS), success, torch.stack(ends).any(2).any(1)

    def judge(self, *tensors: Tensor) -> Blocks:
        state = parted(SeedState, SEEDS, tensors[:3])
        losses, strikes, train_loss, loss, expected, *norms = tensors[3:]
        governor = Governor.__new__(Governor)
        governor.classes, governor.limits = self.step.engine.host.classes, Limits()
        governor.losses, governor.strikes = losses, strikes
        epoch, scores = EpochResult(train_loss, loss, *norms, []), Scores(loss, loss, expected)
        reason = self.step.judge(governor, epoch, scores, state)
        return reason, governor.losses, governor.strikes, governor.healthy

    def pass_time(self, *tensors: Tensor) -> Blocks:
        acted, signals = self._record(tensors)
        stage, parameters, rolled, before, accuracy, contribution, *epoch = tensors[5:]
        then = self._passed(replace(acted, stage=stage), signals, parameters)
        measured = Measurement(Scores(accuracy, accuracy, accuracy), None, contribution)
        result = EpochResult(epoch[0], epoch[0], epoch[1], epoch[2], epoch[3:])
        now = self.step.pass_time(acted, rolled, then, before, result, measured)
        rest = now.legal, now.seed_parameters, now.ever, now.birth_accuracy
        return *joined(now.state, SEEDS), *joined(now.signals, MEASURED), *rest

    def observe(self, *tensors: Tensor) -> Blocks:
        """The first two features of the host come later, for the step is a number."""
        parameters, score, twin_score, *progress = tensors[5:]
        now = self._passed(*self._record(tensors), parameters)
        past = Progress(0, self.step.engine.episode_length, *progress)
        seen = self.step.observe(past, now, score, twin_score)
        return seen.host, seen.slots, seen.blueprints, seen.critic

    def _record(self, tensors: Sequence[Tensor]) -> tuple[SeedState, SeedSignals]:
        return parted(SeedState, SEEDS, tensors[:3]), parted(SeedSignals, MEASURED, tensors[3:5])

    def _passed(self, state: SeedState, signals: SeedSignals, parameters: Tensor) -> Passed:
        """Where rows stand, as far as anybody reads it here."""
        own, own_signals = (
            record.map(lambda x: x[: self.step.count]) for record in (state, signals)
        )
        return Passed(state, own, signals, own_signals, *[parameters] * 4)


class GraphStep(TorchStep):
    """Implements ``StepFunctions`` with four graphs, each made when it is first called."""

    def __init__(self, make: Make, engine: Engine, count: int, rules: Rules, kinds: Tensor):
        super().__init__(engine, count, rules, kinds)
        self.make, self.flat = make, Flat(TorchStep(engine, count, rules, kinds))
        self.nowhere = torch.zeros(len(engine.rows), dtype=torch.bool)
        self.graphs: dict[str, Graph] = {}
        self.last: dict[str, tuple[Tensor, ...]] = {}

    def act(self, state: SeedState, actions: Tensor, legal: Tensor) -> Acted:
        *blocks, success, ends = self._call("act", *joined(state, SEEDS), actions, legal)
        return Acted(*self._cut(CutState, blocks), success, *ends.tolist())

    def judge(
        self, governor: Governor, epoch: EpochResult, scores: Scores, acted: SeedState
    ) -> Tensor:
        reason, governor.losses, governor.strikes, governor.healthy = self._call(
            "judge",
            *(*joined(acted, SEEDS), governor.losses, governor.strikes),
            *(epoch.loss, scores.loss, scores.expected),
            *(epoch.host_gradient_norm, epoch.seed_gradient_norm),
        )
        return reason

    def pass_time(
        self,
        acted: SeedState,
        rolled: Tensor | None,
        then: Passed,
        accuracy: Tensor,
        epoch: EpochResult,
        measurement: Measurement,
    ) -> Passed:
        said = self._call(
            "pass_time",
            *(*joined(acted, SEEDS), *joined(then.signals, MEASURED)),
            *(then.state.stage, then.seed_parameters),
            *(self.nowhere if rolled is None else rolled, accuracy, measurement.scores.accuracy),
            *(measurement.contribution, epoch.loss, epoch.host_gradient_norm),
            *(epoch.seed_gradient_norm, *epoch.seed_tensor_norms),
        )
        seeds, signals = self._cut(CutState, said[:3]), self._cut(CutSignals, said[3:5])
        return Passed(*seeds, *signals, *said[5:])

    def observe(
        self, progress: Progress, now: Passed, score: Tensor, twin_score: Tensor
    ) -> Features:
        seen = self._call(
            "observe",
            *(*joined(now.state, SEEDS), *joined(now.signals, MEASURED)),
            *(now.seed_parameters, score, twin_score, progress.losses, progress.expected),
            *(progress.train_loss, progress.train_accuracy, progress.last_op),
            *(progress.success, progress.rolled_back),
        )
        part = progress.step / progress.episode_length
        seen[0][:, 0], seen[0][:, 1] = part, 1.0 - part
        return Features(*seen)

    def difference(self) -> float:
        """How far the numbers of the last step are from torch's, relative to 1 + |number|.

        Raises:
            AssertionError: an integer or a bool is another, or a number is further off than 1e-6.
        """
        worst = 0.0
        for name, arguments in self.last.items():
            pairs = zip(
                self.graphs[name](*arguments), getattr(self.flat, name)(*arguments), strict=True
            )
            for found, expected in pairs:
                tolerance = TOLERANCE if expected.is_floating_point() else 0.0
                torch.testing.assert_close(
                    found, expected, rtol=tolerance, atol=tolerance, equal_nan=True
                )
                off = ((found - expected).abs() / (1 + expected.abs())) if tolerance else found[:0]
                worst = max([worst, *off.nan_to_num(0.0, 0.0, 0.0).flatten().tolist()])
        return worst

    def _call(self, name: str, *arguments: Tensor) -> Sequence[Tensor]:
        if name not in self.graphs:
            with torch.inference_mode(False), torch.no_grad():
                copies = tuple(x.clone() for x in arguments)
                self.graphs[name] = self.make(getattr(self.flat, name), copies, name)
        self.last[name] = arguments
        return self.graphs[name](*arguments)

    def _cut(self, kind: type, blocks: Sequence[Tensor]):
        return kind.of(tuple(blocks)), kind.of(tuple(blocks), self.count)


def traced(function: Graph, examples: tuple[Tensor, ...]) -> torch.fx.GraphModule:
    """The operations of a function, with the tables it looks into as constants."""
    return make_fx(lambda *tensors: tuple(function(*tensors)))(*examples)


def compiled(function: Graph, examples: tuple[Tensor, ...], name: str, **settings) -> Graph:
    """A traced graph by ``torch.compile``."""
    graph = traced(function, examples)
    return torch.compile(graph.forward, fullgraph=True, dynamic=False, **settings)


def standalone(function: Graph, examples: tuple[Tensor, ...], name: str) -> Graph:
    """The same without dynamo, and so without guards."""
    graph = traced(function, examples)
    settings = {"dynamic_shapes": "from_example_inputs"}
    return torch._inductor.standalone_compile(graph, list(examples), **settings)


def packaged(function: Graph, examples: tuple[Tensor, ...], name: str) -> Graph:
    """A library that inductor made ahead of time; found again by shape, whatever the code says."""

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Sequence[Tensor]:
            return function(*tensors)

    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    path = Path(folder) / f"{name}_{len(examples)}_{examples[0].shape[1]}.pt2"
    if not path.exists():
        program = torch.export.export(Module(), examples, strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    package = torch._inductor.aoti_load_package(str(path))
    return lambda *tensors: package.loader.run(list(tensors))
