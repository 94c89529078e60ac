"""The lifecycle of the seeds of one module, which advances after every epoch of training.

The lifecycle is that of the engine at N = 1. The validation of the module comes from outside.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, is_dataclass
from math import isfinite, log1p
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.lifecycle import Rules, roll_back
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.kasmina.slots import SlotSpec
from esper.kasmina.transfer import CPU
from esper.leyline.actions import ALPHA_SPEED_STEPS, ALPHA_TARGETS, BLUEPRINTS, HEADS, Op, Style
from esper.leyline.errors import UsageError
from esper.leyline.stages import Stage
from esper.own_models.grafted_model import GraftedModel
from esper.own_models.growth_result import EpochOutcome
from esper.own_models.objectives import Validation
from esper.tamiyo.baselines import Actor, NeverActor
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import HISTORY, Observation, Progress, log_price
from esper.tamiyo.step_functions import RowsAfterStep, TorchStep
from esper.tamiyo.try_and_keep import OF_OWN_MODELS, RuleActor
from esper.tolaria.governor import DivergenceDetector, Limits, Reason
from esper.tolaria.results import SLOT_MEASURES, Measurement, Scores


class LifecycleController:
    """Measures the seeds of a module, checks it, ticks its lifecycle, and lets a policy act.

    Args:
        body: the module and its slots.
        actor: the policy, which has begun.
        validate: returns the validation of the module as it is.
        price: price of parameters, see ``features.utility``.
        max_parameters: most parameters of the module with all its seeds; None for no limit.
        classes: see ``DivergenceDetector``.
    """

    def __init__(
        self, body: GraftedModel, actor: Actor, validate: Callable[[], Validation], price: float,
        max_parameters: int | None, classes: int | None,
    ):  # fmt: skip
        self.body, self.slots, self.validate = body, body.slots, validate
        self.max_parameters, self._price = max_parameters, price
        self._actor, self._count = actor, body.host.parameter_count
        slots, epochs = body.slots, body.episode_length
        self._kinds = torch.zeros(len(slots), len(BLUEPRINTS), dtype=torch.bool)
        for s, slot in enumerate(slots):
            self._kinds[s, list(slot.kinds)] = True
        rules = Rules.for_horizon(epochs, len(slots))
        self._steps = TorchStep(body, 1, rules, self._kinds.clone())
        shape = (1, len(slots))
        self._now = self._steps.begin(
            SeedState.dormant(shape, CPU), SeedSignals.unknown(shape, CPU)
        )
        self.state, self._accuracy = self._now.state, torch.full((1,), float("nan"))
        self._detector = DivergenceDetector(1, CPU, classes)
        self._snapshot: dict[str, Tensor] | None = None
        self._observations: list[dict[str, Tensor]] = []
        self._first_step = 0
        self._words: set[str] = set()
        unknown = torch.full((1, HISTORY + 1), float("nan"))
        self._progress = Progress(
            step=0, episode_length=epochs, losses=unknown, expected=unknown.clone(),
            train_loss=unknown[:, 0].clone(), train_accuracy=unknown[:, 0].clone(),
            slot_measures=torch.full((*shape, len(SLOT_MEASURES)), float("nan")),
            last_op=torch.zeros(1, dtype=torch.long), success=torch.ones(1, dtype=torch.bool),
            rolled_back=torch.zeros(1, dtype=torch.bool),
            log_price=log_price(torch.tensor([price])), deadline=torch.ones(1, dtype=torch.float64),
        )  # fmt: skip

    @property
    def stages(self) -> dict[str, Stage]:
        """Stage of each slot."""
        codes = self.state.stage[0].tolist()
        return {slot.name: Stage(stage) for slot, stage in zip(self.slots, codes, strict=True)}

    @property
    def acting_parameters(self) -> int:
        """Parameters of the seeds that act on the output."""
        return int(self.body.seed_parameters(self.state)[self.state.acting].sum())

    def new_words(self, actions: Sequence[str]) -> list[str]:
        """What the words of the lifecycle mean that ``actions`` are the first to use."""
        text = "\n".join(actions)
        words = [word for word in MEANINGS if word in text and word not in self._words]
        self._words.update(words)
        return [f"({word}: {MEANINGS[word]})" for word in words]

    def remember(self, validation: Validation) -> None:
        """Add a validation to the history that the policy sees."""
        progress = self._progress
        loss, score = torch.tensor([[validation.loss]]), torch.tensor([[validation.score]])
        progress.losses = torch.cat([progress.losses[:, 1:], loss], 1)
        progress.expected = torch.cat([progress.expected[:, 1:], score], 1)

    def after_epoch(
        self, validation: Validation, train_loss: float | None, number: int
    ) -> EpochOutcome:
        """Measure, check, tick and act after epoch ``number``, from 1.

        Args:
            validation: validation of the module as it is.
            train_loss: mean training loss; None if it is not known.
            number: number of the epoch. In the last, the policy does not act.
        """
        body, before = self.body, self.state
        if number == 1 and self._detector.classes is None and validation.loss > 0.0:
            # Without classes the loss has no scale of its own.
            self._detector.limits = Limits(runaway_loss=RUNAWAY * validation.loss)
        epoch = body.result(validation.loss if train_loss is None else train_loss)
        measurement, actions = self._measurement(validation), []
        rolled_back = torch.zeros(1, dtype=torch.bool)
        if self._snapshot is not None and bool(before.computing.any()):
            scores = measurement.scores
            reason = Reason(int(self._steps.check(self._detector, epoch, scores, before)))
            if reason is not Reason.NONE:
                rolled_back = ~rolled_back
                actions.append(f"rolled back: {reason.name.lower()}")
                body.restore(self._snapshot)
                self._show(roll_back(before, rolled_back))
                epoch.forget(rolled_back)
                validation = self.validate()
                measurement = self._measurement(validation)
        self._now = self._steps.advance_lifecycle(
            before, rolled_back if bool(rolled_back) else None, self._now, self._accuracy, epoch,
            measurement,
        )  # fmt: skip
        self._accuracy = measurement.scores.accuracy
        self.remember(validation)
        progress = self._progress
        progress.step, progress.rolled_back = number, rolled_back
        progress.train_loss = torch.tensor([float("nan") if train_loss is None else train_loss])
        if (
            self._snapshot is not None
            and number % self._detector.every == 0
            and bool(self._detector.healthy)
        ):
            self._snapshot = body.snapshot()
        self._show(self._now.state)
        if number < body.episode_length:
            actions += self._act(number)
        contributions = zip(self.slots, measurement.contribution[0].tolist(), strict=True)
        contribution_of = {slot.name: value for slot, value in contributions if isfinite(value)}
        return EpochOutcome(validation, contribution_of, actions)

    def end(self) -> list[str]:
        """Fossilise the acting seeds that earn more than their price, and remove the other ones.

        Returns:
            what was done and why, a line each; the figures before and after where the output of the
            module changed.
        """
        state, lines, removes = self.state, [], False
        candidates = state.acting & (state.stage != Stage.FOSSILISED)
        if bool(candidates.any()):
            before = self.validate()
            contributions = self._measurement(before).contribution[0]
            sizes = self.body.seed_parameters(state)[0]
            for s in candidates[0].nonzero()[:, 0].tolist():
                cost = self._price * log1p(int(sizes[s]) / self._count)
                why = f"contribution {100 * contributions[s]:+.2f}, price {100 * cost:.2f} points"
                stays = bool(contributions[s] > cost)
                removes |= not stays
                if stays:
                    state.stage[0, s] = Stage.FOSSILISED
                what = f"stays at alpha {state.alpha[0, s]:.2f}" if stays else "is removed"
                name = BLUEPRINTS[int(state.blueprint[0, s])]
                lines.append(f"{self.slots[s].name}: {name} {what} at the end ({why})")
        self._show(roll_back(state, torch.ones(1, dtype=torch.bool)))
        self.body.close()
        if removes:
            lines.append(f"{before.shown()} before, {self.validate().shown()} after")
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Everything but module and optimizer, as nested dictionaries of tensors and numbers."""
        detector = self._detector
        return {
            "slots": [asdict(slot) for slot in self.slots],
            "order": list(self.body.order),
            "first_norms": dict(self.body.first_norms),
            "state": _plain(self.state),
            "now": _plain(self._now),
            "accuracy": self._accuracy,
            "detector": {name: getattr(detector, name) for name in _OF_DETECTOR},
            "runaway": detector.limits.runaway_loss,
            "kept": self._snapshot,
            "progress": _plain(self._progress),
            "seen": [dict(tensors) for tensors in self._observations],
            "first_step": self._first_step,
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """The inverse of ``state_dict``, for a module without seeds: attaches those it had.

        Their weights come with the state_dict of the module. The policy sees all observations
        again, so that its own state is as it was.

        Raises:
            UsageError: the policy does not act as it did.
        """
        self.state = SeedState(**content["state"])
        now = content["now"]
        states = {name: SeedState(**now[name]) for name in ("state", "own")}
        signals = {name: SeedSignals(**now[name]) for name in ("signals", "own_signals")}
        self._now = RowsAfterStep(**(now | states | signals))
        self._accuracy, self._snapshot = content["accuracy"], content["kept"]
        for name in _OF_DETECTOR:
            setattr(self._detector, name, content["detector"][name])
        self._detector.limits = Limits(runaway_loss=content["runaway"])
        self._progress = Progress(**content["progress"])
        for slot in content["order"]:
            self.body.germinate(self.state, slot, 0)
        self.body.first_norms = dict(content["first_norms"])
        self.body.show(self.state)
        self._first_step, self._observations = content["first_step"], content["seen"]
        for step, step_tensors in enumerate(self._observations, self._first_step):
            tensors = dict(step_tensors)
            actions = tensors.pop("actions")
            if not torch.equal(self._actions(Observation.from_tensors(tensors), step), actions):
                raise UsageError(
                    "policy: on the same observations it does not act as it did, so growth cannot "
                    "go on from here; give the policy that began it"
                )

    def _act(self, number: int) -> list[str]:
        """Let the policy act after epoch ``number``; returns what it did, and why."""
        body, before = self.body, self._now
        allowance = self._parameters_left()
        kinds = self._kinds & (body.parameter_table.amin(2) <= allowance)
        legal = before.legal.clone()
        legal[:, Op.GERMINATE] &= kinds.any(1)
        masks = ActionMasks(legal, kinds[None])
        score = self._progress.expected[:, -1]
        features = self._steps.observe(self._progress, before, score, score)
        observation = Observation(
            features.host, features.slots, features.blueprints, torch.zeros_like(features.critic),
            masks,
        )  # fmt: skip
        # Masks are changed below; what the policy observed is kept.
        tensors = {name: x.clone() for name, x in observation.tensors().items()}
        actions = self._actions(observation, number)
        self._first_step = self._first_step or number
        self._observations.append(tensors | {"actions": actions})
        choice = dict(zip(HEADS, actions[0].tolist(), strict=True))
        op, slot = Op(choice["op"]), choice["slot"]
        size = int(body.parameter_table[slot, choice["blueprint"], choice["style"]])
        if op is Op.GERMINATE and size > allowance:
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
            self._snapshot = self._snapshot or body.snapshot()
            body.germinate(done.state, slot, number)
        why = reason_for(op, slot, choice, before.state, before.signals, self._progress)
        self._show(done.state)
        if done.fossilises:
            self._snapshot = body.snapshot()
        return [f"{self.slots[slot].name}: {why}"]

    def _actions(self, observation: Observation, step: int) -> Tensor:
        with torch.no_grad():
            return self._actor.act(observation, step)[0]

    def _show(self, state: SeedState) -> None:
        self.state = state
        self.body.show(state)

    def _parameters_left(self) -> float:
        """How many parameters the limit still allows."""
        if self.max_parameters is None:
            return float("inf")
        return self.max_parameters - self._count - int(self._now.seed_parameters.sum())

    def _measurement(self, validation: Validation) -> Measurement:
        """The scores, and the contribution of every seed that acts."""
        contribution = torch.full((1, len(self.slots)), float("nan"))
        for s in (self.state.alpha[0] > 0).nonzero()[:, 0].tolist():
            with self.body.without(s):
                contribution[0, s] = validation.score - self.validate().score
        accuracy = validation.score if validation.accuracy is None else validation.accuracy
        numbers = validation.loss, accuracy, validation.score
        scores = Scores(*(torch.tensor([number]) for number in numbers))
        return Measurement(scores, None, contribution)


RUNAWAY = 5.0
"""How many times the first validation loss a runaway loss exceeds; about 12 nats of ten classes."""

MEANINGS = {
    "germinates": "a seed, a small module, is put behind a layer; the network does not use it yet",
    "TRAINING": "the seed learns aside; what the network computes stays as it is",
    "BLENDING": "its output is mixed in, from alpha 0 to 1",
    "HOLDING": "it acts in full until it is decided whether it stays",
    "contribution": "score with the seed minus the score without it",
    "FOSSILISED": "the seed stays",
    "pruned": "the seed is removed",
}
"""What the words in the lines of the lifecycle mean."""

_OF_DETECTOR = ("losses", "strikes", "healthy")
"""What changes of a ``DivergenceDetector``."""


def _plain(value: Any) -> Any:
    """A record and the records within it as dictionaries; another value as it is."""
    if not is_dataclass(value):
        return value
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}


def reason_for(
    op: Op, slot: int, choice: dict[str, int], state: SeedState, signals: SeedSignals,
    progress: Progress,
) -> str:  # fmt: skip
    """An action that took effect, and the figures behind it.

    Args:
        op: the operation.
        slot: index of its slot.
        choice: options of all heads.
        state: the seeds before it, ``[1, S]``.
        signals: their measurements.
        progress: the scores so far.
    """
    if op is Op.GERMINATE:
        blueprint, style = BLUEPRINTS[choice["blueprint"]], Style(choice["style"]).name
        return f"{blueprint} germinates, {style} ({_trend(progress.losses)})"
    name = BLUEPRINTS[int(state.blueprint[0, slot])]
    contribution = float(signals.contribution[0, slot])
    points = f"contribution {100 * contribution:+.2f} points"
    if op is Op.PRUNE:
        is_number = contribution == contribution
        return f"{name} is pruned ({points if is_number else 'contribution unknown'})"
    if op is Op.FOSSILISE:
        return f"{name} becomes FOSSILISED ({points})"
    if op is Op.SET_ALPHA_TARGET:
        steps = ALPHA_SPEED_STEPS[choice["alpha_speed"]]
        target = ALPHA_TARGETS[choice["alpha_target"]]
        return f"{name} goes to alpha {target} in {steps} epochs ({points})"
    stage = Stage(int(state.stage[0, slot]))
    health = f"gradient health {float(signals.health[0, slot]):.2f}"
    after = {
        Stage.GERMINATED: ("TRAINING", "newly germinated"),
        Stage.TRAINING: ("BLENDING", f"{int(state.stage_age[0, slot])} epochs old, {health}"),
        Stage.BLENDING: ("HOLDING", f"alpha is 1, {points}"),
    }[stage]
    return f"{name} becomes {after[0]} ({after[1]})"


def _trend(losses: Tensor) -> str:
    """How the validation loss changed over the last epochs; ``losses [1, epochs]``, latest last."""
    values = [x for x in losses[0].tolist() if x == x]
    if len(values) < 2:
        return "first epochs"
    change = (values[-1] - values[0]) / max(abs(values[0]), 1e-12) / (len(values) - 1)
    return f"validation loss {100 * change:+.1f} % an epoch over the last {len(values) - 1}"


LEARNED_ACTOR = "esper.simic.tools.grow:learned_actor"
"""Makes the actor of a policy that was trained; named, because the learner lies above this."""


def actor(
    policy: str | Actor,
    slots: tuple[SlotSpec, ...],
    epochs: int,
    seed: int,
    warn: Callable[[str], None],
) -> Actor:
    """The actor called ``policy``: one in the box, or the directory of a run.

    Args:
        policy: the name; or an actor, which is returned.
        slots: slots of the module.
        epochs: epochs of training.
        seed: seed of a learned policy's draws.
        warn: told that a learned policy was trained on other hosts.

    Raises:
        UsageError: there is no such policy, or its checkpoint does not fit this version.
    """
    if not isinstance(policy, str):
        player: Actor = policy
    elif policy == "never":
        player = NeverActor()
    elif policy == "heuristic":
        from esper.tamiyo.heuristic import HeuristicActor

        player = HeuristicActor(epochs)
    elif policy == "rule":
        player = RuleActor(lambda: [slots], epochs, settings=OF_OWN_MODELS)
    else:
        player = resolve_name(LEARNED_ACTOR)(policy, seed, warn)
    player.begin(torch.zeros(1, dtype=torch.long), 0)
    return player
