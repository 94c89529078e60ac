"""Growth: the controller that grows a module within a training loop of the user's own."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from esper.kasmina.grafts.attachment import grown_seeds
from esper.kasmina.grafts.slot_search import find_slots
from esper.kasmina.lifecycle import Rules, roll_back
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import BLUEPRINTS, HEADS, Op
from esper.leyline.errors import UsageError
from esper.leyline.stages import Stage
from esper.simic.growth.collect import Actor
from esper.simic.growth.step_functions import TorchStep
from esper.simic.own_models.history import EpochRecord
from esper.simic.own_models.policies import actor
from esper.simic.own_models.reasons import reason_for
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import HISTORY, USUAL_RENT, Observation, Progress, log_price
from esper.tolaria.backends import Scores
from esper.tolaria.engine import Measurement
from esper.tolaria.governor import DivergenceDetector, Reason
from esper.tolaria.own_model.grafted_model import GraftedModel, parameter_count
from esper.tolaria.own_model.samples import evaluating, first_samples, sample_count, undisturbed
from esper.tolaria.own_model.validation import Scale, Validation, as_score
from esper.tolaria.slot_measures import SLOT_MEASURES

_CPU = torch.device("cpu")


class Growth:
    """Grows a module while a loop of the user's own trains it.

    The loop calls ``step`` once per epoch, after validation. A seed that germinates joins a group
    of the optimizer: a group with the name ``seeds`` if there is one, else the group of the
    parameters before it. Its learning rate therefore follows that group's schedule. While a seed is
    in TRAINING, neither outputs nor gradients of the module change.

    Args:
        model: the module, not compiled and without seeds; it is grown in place.
        optimizer: the optimizer that trains it.
        policy: one of ``policies.POLICIES``, the directory of a run, or an ``Actor``.
        epochs: epochs of training; the ages of the lifecycle scale with them.
        validate: returns the validation score (or a ``Validation``) of the module as it is. It is
            called once more per epoch for each seed that acts, with that seed at alpha 0. Every
            policy but ``never`` needs it.
        example: inputs of the module, a tensor, a tuple or a dict; None to take those of its first
            forward pass. The slots are found with them.
        slots: names of modules behind which seeds may grow; None to find them.
        higher_is_better: whether scores are like accuracies (1 is perfect) or like losses.
        price: price of parameters, see ``rewards.utility``: score for a growth by a factor of e.
        max_parameters: most parameters of the module with all its seeds; None for no limit.
        seed: determines the initial weights of seeds and the draws of a learned policy.
        classes: number of classes if ``validate`` returns a cross-entropy loss, by which a
            collapsed module is recognised.
        report: called with each message, such as ``print``; None for silence.

    Attributes:
        history: the epochs so far.

    Raises:
        UsageError: an argument is not valid; the text says which and what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        policy: str | Actor = "heuristic",
        epochs: int = 40,
        validate: Callable[[], "float | Validation"] | None = None,
        example: Any = None,
        slots: Sequence[str] | None = None,
        higher_is_better: bool = True,
        price: float = USUAL_RENT,
        max_parameters: int | None = None,
        seed: int = 0,
        classes: int | None = None,
        report: Callable[[str], None] | None = print,
    ):
        _check(model, optimizer, epochs, price, max_parameters)
        if validate is None and policy != "never":
            raise UsageError(
                f"validate: policy {policy!r} needs the score without a seed; give a "
                "function that returns the validation score"
            )
        self.model, self.optimizer, self.policy = model, optimizer, policy
        self.epochs, self.validate, self.names = epochs, validate, slots
        self.higher_is_better = higher_is_better
        self.price, self.max_parameters = price, max_parameters
        self.seed, self.classes, self.report = seed, classes, report
        self.history: list[EpochRecord] = []
        self.finished = False
        self._scale = Scale()
        self._body: GraftedModel | None = None
        self._example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        if policy == "never":
            self._count = parameter_count(model)
        elif example is not None:
            self._begin(_arguments(example))
        else:
            self._capture = model.register_forward_pre_hook(self._captured, with_kwargs=True)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots; none before they are found, and under the policy ``never``."""
        return () if self._body is None else self._body.slots

    @property
    def seeds(self) -> dict[str, str]:
        """Blueprint of each seed by its slot."""
        return {name: seed.blueprint for name, seed in grown_seeds(self.model).items()}

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of the module and of each seed, each to ``max_norm``.

        ``clip_grad_norm_`` over all parameters would let a seed in TRAINING change how its module
        is updated.
        """
        if self._body is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        else:
            self._body.clip(max_norm)

    def begin(self, validation_score: "float | Validation | None" = None) -> None:
        """Note the score of the untrained module, which a policy may look at. Optional.

        Args:
            validation_score: see ``step``.
        """
        if self._body is not None:
            self._remember(self._validated(validation_score))

    def step(
        self,
        validation_score: "float | Validation | None" = None,
        *,
        train_loss: float | None = None,
    ) -> EpochRecord:
        """End an epoch: check and measure the seeds, let the policy act, and change the module.

        Args:
            validation_score: score of the module as it is, or a ``Validation``; None to call
                ``validate``.
            train_loss: mean training loss of the epoch, which a learned policy looks at.

        Returns:
            what happened. After the last epoch, seeds that are not fossilised are removed.

        Raises:
            UsageError: all epochs are over, there is no score, or no forward pass was seen.
        """
        if self.finished:
            raise UsageError(
                f"step: growth ended after epoch {len(self.history)}; make a new Growth with more "
                "epochs"
            )
        validation = self._validated(validation_score)
        if self.policy == "never":
            record = self._record(validation, train_loss, {}, [])
        else:
            if self._body is None:
                self._begin(self._example)
            record = self._grow(validation, train_loss)
        self.history.append(record)
        if self.report is not None:
            self.report(record.line(self.epochs))
        if len(self.history) == self.epochs:
            self.finish()
        return record

    def finish(self) -> nn.Module:
        """Remove the seeds that are not fossilised, and end growth.

        Returns:
            the module.
        """
        if self._body is not None and not self.finished:
            self._show(roll_back(self.state, torch.ones(1, dtype=torch.bool)))
            self._body.close()
        self.finished = True
        return self.model

    def _captured(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._example = args, kwargs
        self._capture.remove()

    def _begin(self, example: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        """Find the slots, and prepare the lifecycle."""
        if example is None:
            raise UsageError(
                "step: the module has not been called yet; train an epoch first, or give example="
            )

        def run(half: bool) -> Any:
            args, kwargs = example
            if half and (count := sample_count((*args, *kwargs.values()))) > 1:
                args = first_samples(args, count // 2)
                kwargs = first_samples(kwargs, count // 2)
            return self.model(*args, **kwargs)

        with undisturbed(), evaluating(self.model), torch.no_grad():
            slots = find_slots(self.model, run, self.names)
        self._body = body = GraftedModel(self.model, slots, self.optimizer, self.epochs, self.seed)
        self._count = body.host.parameter_count
        self.kinds = torch.zeros(len(slots), len(BLUEPRINTS), dtype=torch.bool)
        for s, slot in enumerate(slots):
            self.kinds[s, list(slot.kinds)] = True
        self._actor: Actor = actor(self.policy, slots, self.epochs, self.seed, self._say)
        self._steps = TorchStep(
            body, 1, Rules.for_horizon(self.epochs, len(slots)), self.kinds.clone()
        )
        shape = (1, len(slots))
        self._now = self._steps.begin(
            SeedState.dormant(shape, _CPU), SeedSignals.unknown(shape, _CPU)
        )
        self.state, self._accuracy = self._now.state, torch.full((1,), float("nan"))
        self._detector = DivergenceDetector(1, _CPU, self.classes)
        self._kept: dict[str, Tensor] | None = None
        unknown = torch.full((1, HISTORY + 1), float("nan"))
        self._progress = Progress(
            step=0,
            episode_length=self.epochs,
            losses=unknown,
            expected=unknown.clone(),
            train_loss=unknown[:, 0].clone(),
            train_accuracy=unknown[:, 0].clone(),
            slot_measures=torch.full((*shape, len(SLOT_MEASURES)), float("nan")),
            last_op=torch.zeros(1, dtype=torch.long),
            success=torch.ones(1, dtype=torch.bool),
            rolled_back=torch.zeros(1, dtype=torch.bool),
            log_rent=log_price(torch.tensor([self.price])),
            deadline=torch.ones(1, dtype=torch.float64),
        )
        self._say("slots: " + ", ".join(f"{slot.name} ({slot.channels})" for slot in slots))

    def _grow(self, validation: Validation, train_loss: float | None) -> EpochRecord:
        """The lifecycle after an epoch: measure, check, tick, act."""
        body, acted = self._body, self.state
        assert body is not None
        epoch = body.result(validation.loss if train_loss is None else train_loss)
        measurement, actions = self._measured(validation), []
        rolled_back = torch.zeros(1, dtype=torch.bool)
        if self._kept is not None and bool(acted.computing.any()):
            scores = measurement.scores
            found = Reason(int(self._steps.check(self._detector, epoch, scores, acted)))
            if found is not Reason.NONE:
                rolled_back = ~rolled_back
                actions.append(f"rolled back: {found.name.lower()}")
                body.restore(self._kept)
                self._show(roll_back(acted, rolled_back))
                epoch.forget(rolled_back)
                validation = self._validated(None)
                measurement = self._measured(validation)
        self._now = self._steps.advance_lifecycle(
            acted,
            rolled_back if bool(rolled_back) else None,
            self._now,
            self._accuracy,
            epoch,
            measurement,
        )
        self._accuracy = measurement.scores.accuracy
        self._remember(validation)
        progress, number = self._progress, len(self.history) + 1
        progress.step, progress.rolled_back = number, rolled_back
        progress.train_loss = torch.tensor([float("nan") if train_loss is None else train_loss])
        if (
            self._kept is not None
            and number % self._detector.every == 0
            and bool(self._detector.healthy)
        ):
            self._kept = body.snapshot()
        self._show(self._now.state)
        if number < self.epochs:
            actions += self._act(number)
        contributions = zip(self.slots, measurement.contribution[0].tolist(), strict=True)
        known = {slot.name: value for slot, value in contributions if isfinite(value)}
        return self._record(validation, train_loss, known, actions)

    def _act(self, number: int) -> list[str]:
        """Let the policy act after epoch ``number``; returns what it did, and why."""
        body, before = self._body, self._now
        assert body is not None
        left = self._parameters_left()
        kinds = self.kinds & (body.parameter_table.amin(2) <= left)
        legal = before.legal.clone()
        legal[:, Op.GERMINATE] &= kinds.any(1)
        masks = ActionMasks(legal, kinds[None])
        score = self._progress.expected[:, -1]
        seen = self._steps.observe(self._progress, before, score, score)
        observation = Observation(
            seen.host, seen.slots, seen.blueprints, torch.zeros_like(seen.critic), masks
        )
        with torch.no_grad():
            actions = self._actor.act(observation, number)[0]
        choice = dict(zip(HEADS, actions[0].tolist(), strict=True))
        op, slot = Op(choice["op"]), choice["slot"]
        size = int(body.parameter_table[slot, choice["blueprint"], choice["style"]])
        if op is Op.GERMINATE and size > left:
            # The gate of a style may exceed the limit though the blueprint alone does not.
            legal[0, Op.GERMINATE, slot] = False
        self._steps.kinds = kinds
        done = self._steps.act(before.state, actions, legal)
        success = bool(done.success)
        self._progress.success = done.success
        self._progress.last_op = torch.tensor([int(op if success else Op.WAIT)])
        if not success or op is Op.WAIT:
            return []
        if done.germinates:
            self._kept = self._kept or body.snapshot()
            body.germinate(done.state, slot, number)
        why = reason_for(op, slot, choice, before.state, before.signals, self._progress)
        self._show(done.state)
        if done.fossilises:
            self._kept = body.snapshot()
        return [f"{self.slots[slot].name}: {why}"]

    def _show(self, state: SeedState) -> None:
        assert self._body is not None
        self.state = state
        self._body.show(state)

    def _parameters_left(self) -> float:
        """How many parameters the limit still allows."""
        if self.max_parameters is None:
            return float("inf")
        return self.max_parameters - self._count - int(self._now.seed_parameters.sum())

    def _measured(self, validation: Validation) -> Measurement:
        """The scores, and the contribution of every seed that acts."""
        body = self._body
        assert body is not None
        contribution = torch.full((1, len(self.slots)), float("nan"))
        for s in (self.state.alpha[0] > 0).nonzero()[:, 0].tolist():
            with body.without(s):
                contribution[0, s] = validation.score - self._validated(None).score
        accuracy = validation.score if validation.accuracy is None else validation.accuracy
        numbers = validation.loss, accuracy, validation.score
        scores = Scores(*(torch.tensor([number]) for number in numbers))
        return Measurement(scores, None, contribution)

    def _remember(self, validation: Validation) -> None:
        progress = self._progress
        loss, score = torch.tensor([[validation.loss]]), torch.tensor([[validation.score]])
        progress.losses = torch.cat([progress.losses[:, 1:], loss], 1)
        progress.expected = torch.cat([progress.expected[:, 1:], score], 1)

    def _validated(self, found: "float | Validation | None") -> Validation:
        if found is None:
            if self.validate is None:
                raise UsageError("step: got no score; give one, or give validate= to Growth")
            with undisturbed(), evaluating(self.model), torch.no_grad():
                found = self.validate()
        if isinstance(found, Validation):
            return found
        value = float(found)
        score = as_score(value, self.higher_is_better, self._scale)
        return Validation(max(1.0 - value, 0.0) if self.higher_is_better else value, score)

    def _record(
        self,
        validation: Validation,
        train_loss: float | None,
        contributions: dict[str, float],
        actions: list[str],
    ) -> EpochRecord:
        seeds, added, stages = 0, 0, {}
        if self._body is not None:
            parameters = self._body.seed_parameters(self.state)
            seeds = int(parameters.sum())
            added = int(torch.where(self.state.acting, parameters, 0).sum())
            found = self.state.stage[0].tolist()
            stages = {
                slot.name: Stage(stage) for slot, stage in zip(self.slots, found, strict=True)
            }
        return EpochRecord(
            len(self.history) + 1,
            train_loss,
            validation.loss,
            validation.score,
            validation.accuracy,
            validation.metric,
            self._count + seeds,
            added,
            stages,
            contributions,
            actions,
        )

    def _say(self, message: str) -> None:
        if self.report is not None:
            self.report(message)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, dict):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}


def _check(
    model: nn.Module, optimizer: Optimizer, epochs: int, price: float, most: int | None
) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: got a {type(model).__name__}; give an nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "model: it is scripted, and seeds need a module; give the nn.Module itself"
        )
    compiled = hasattr(model, "_orig_mod") or any(
        getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()
    )
    if compiled:
        raise UsageError(
            "model: it is compiled, and compiled code does not see new seeds; give the module "
            "itself and compile the result"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UsageError(
            f"model: {type(model).__name__} misses parameters that come later; give model.module"
        )
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise UsageError("model: it has lazy layers; call it once with a batch before growing it")
    if grown_seeds(model):
        raise UsageError("model: it has seeds already; grow a copy without them (esper.strip)")
    if isinstance(optimizer, LBFGS):
        raise UsageError(
            "optimizer: LBFGS keeps one state for all parameters, so no seed can join; use another"
        )
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise UsageError("optimizer: it has no parameter of the model; build it from this model's")
    if not isinstance(epochs, int) or epochs < 1:
        raise UsageError(f"epochs: got {epochs!r}; give a whole number from 1")
    if not (price >= 0.0 and isfinite(price)):
        raise UsageError(f"price: got {price!r}; give a number from 0")
    count = parameter_count(model)
    if most is not None and most < count:
        raise UsageError(f"max_parameters: the module has {count:,} already; give more than that")
