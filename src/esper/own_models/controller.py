"""Growth: the controller that grows a module within a training loop of the user's own."""

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import convert, to_builtins
from torch import nn
from torch.optim import Optimizer

from esper.kasmina.slots import SlotSpec
from esper.kasmina.wider_layers import parameter_count
from esper.leyline.errors import UsageError
from esper.leyline.stages import Stage
from esper.own_models.attachment import grown_seeds
from esper.own_models.growth_result import EpochOutcome, EpochRecord
from esper.own_models.objectives import Evaluator, Scale, Validation, as_score
from esper.own_models.options import GrowthOptions, check_arguments, describe, process_count
from esper.own_models.samples import as_arguments, buffers_kept, evaluating, half_or_all
from esper.tamiyo.baselines import SEARCHES

if TYPE_CHECKING:
    from esper.own_models.lifecycle_controller import LifecycleController


class Growth:
    """Grows a module while a loop of the user's own trains it.

    The loop calls ``step`` once per epoch, after validation. A seed that germinates joins a group
    of the optimizer: a group with the name ``seeds`` if there is one, else the group of the
    parameters before it. Its learning rate therefore follows that group's schedule. While a seed is
    in TRAINING, neither outputs nor gradients of the module change.

    Args:
        model: the module, not compiled and without seeds; it is grown in place.
        optimizer: the optimizer that trains it.
        validate: returns the validation score (or a ``Validation``) of the module as it is. It is
            called once more per epoch for each seed that acts, with that seed at alpha 0. Every
            policy but ``never`` needs it.
        example: inputs of the module, a tensor, a tuple or a dict; None to take those of its first
            forward pass. The slots are found with them.
        classes: number of classes if ``validate`` returns a cross-entropy loss, by which a
            collapsed module is recognised.
        report: called with each message, such as ``print``; None for silence.
        options: see ``options.GrowthOptions``.

    Attributes:
        history: the epochs so far.
        notes: lines for the record of the next epoch.

    Raises:
        UsageError: an argument is not valid; the text says which and what to do.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *,
        validate: Callable[[], "float | Validation"] | None = None, example: Any = None,
        classes: int | None = None, report: Callable[[str], None] | None = print, **options: Any,
    ):  # fmt: skip
        self.options = GrowthOptions(**options)
        check_arguments(model, optimizer, self.options)
        policy = self.options.policy
        if policy in SEARCHES:
            raise UsageError(
                f"policy: {policy!r} trains epochs with and without other layers, in its own loop; "
                f"call esper.grow, or esper.{policy} in your loop, or give another policy"
            )
        # ``grow`` trains what belongs to its process alone.
        is_shared = process_count() > 1 and not isinstance(validate, Evaluator)
        if policy != "never" and is_shared:
            raise UsageError("model: several processes train it; call esper.widen in all of them")
        if validate is None and policy != "never":
            raise UsageError(
                f"validate: policy {policy!r} needs the score without a seed; give a "
                "function that returns the validation score"
            )
        self.model, self.optimizer, self.validate = model, optimizer, validate
        self.classes, self.report = classes, report
        self.history: list[EpochRecord] = []
        self.notes: list[str] = []
        self.finished = False
        self._scale = Scale()
        self._lifecycle: LifecycleController | None = None
        self._count = parameter_count(model)
        self._first_call: FirstCall | None = None
        if policy == "never":
            return
        if example is None:
            self._first_call = FirstCall(model)
        else:
            self._begin(*as_arguments(example))

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots; none before they are found, and under the policy ``never``."""
        return () if self._lifecycle is None else self._lifecycle.slots

    @property
    def seeds(self) -> dict[str, str]:
        """Blueprint of each seed by its slot."""
        return {name: seed.blueprint for name, seed in grown_seeds(self.model).items()}

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of the module and of each seed, each to ``max_norm``.

        ``clip_grad_norm_`` over all parameters would let a seed in TRAINING change how its module
        is updated.
        """
        if self._lifecycle is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        else:
            self._lifecycle.body.clip(max_norm)

    def begin(self, validation_score: "float | Validation | None" = None) -> None:
        """Note the score of the untrained module, which a policy may look at. Optional.

        Args:
            validation_score: see ``step``.
        """
        if self._lifecycle is not None:
            self._lifecycle.remember(self._validation(validation_score))

    def step(
        self, validation_score: "float | Validation | None" = None, *,
        train_loss: float | None = None, old_data: Validation | None = None,
    ) -> EpochRecord:  # fmt: skip
        """End an epoch: check and measure the seeds, let the policy act, and change the module.

        Args:
            validation_score: score of the module as it is, or a ``Validation``; None to call
                ``validate``.
            train_loss: mean training loss of the epoch, which a learned policy looks at.
            old_data: validation on data that the module knew before, to be shown.

        Returns:
            what happened. After the last epoch growth ends, see ``finish``.

        Raises:
            UsageError: all epochs are over, there is no score, or no forward pass was seen.
        """
        if self.finished:
            raise UsageError(
                f"step: growth ended after epoch {len(self.history)}; make a new Growth with more "
                "epochs"
            )
        validation = self._validation(validation_score)
        outcome, self.notes = EpochOutcome(validation, actions=self.notes), []
        if self.options.policy != "never":
            if self._lifecycle is None:
                self._begin(*self._called_with())
            assert self._lifecycle is not None
            outcome = self._lifecycle.after_epoch(validation, train_loss, len(self.history) + 1)
        lives = self._lifecycle
        record = EpochRecord(
            epoch=len(self.history) + 1,
            train_loss=None if train_loss is None else float(train_loss),
            validation=outcome.validation, parameters=parameter_count(self.model),
            added=0 if lives is None else lives.acting_parameters,
            stages={} if lives is None else lives.stages,
            contributions=outcome.contributions, actions=outcome.actions, old_data=old_data,
        )  # fmt: skip
        score = record.validation.score
        if not isfinite(score) and all(isfinite(r.validation.score) for r in self.history):
            self._say(
                f"warning: the validation score is {score}; no seed can be measured until it is "
                "finite"
            )
        self.history.append(record)
        self._say(record.line(self.options.epochs))
        self._explain(record.actions)
        if len(self.history) == self.options.epochs:
            self.finish()
        return record

    def _trial_line(self) -> str:
        """In how many places seeds were tried."""
        stages = [record.stages for record in self.history]
        slots = {slot for each in stages for slot in each}
        trials = {slot for each in stages for slot, stage in each.items() if stage != Stage.DORMANT}
        text = f"seeds were tried in {len(trials)} of {len(slots)} places"
        return text if trials else f"{text}: {len(stages)} epochs were too few for this policy"

    def _explain(self, actions: Sequence[str]) -> None:
        """Say what the words in ``actions`` mean that nothing has said before."""
        if self._lifecycle is not None:
            for line in self._lifecycle.new_words(actions):
                self._say(f"    {line}")

    def note_end(self, line: str) -> None:
        """Say what happened after the last epoch, and note it there."""
        self._say(f"    {line}")
        if self.history:
            self.history[-1].actions.append(line)

    def finish(self) -> nn.Module:
        """Decide about the seeds that are not fossilised yet, and end growth.

        An acting seed that contributes more than its price becomes FOSSILISED as it is, and the
        others are removed.

        Returns:
            the module.
        """
        if self._lifecycle is not None and not self.finished:
            lines = self._lifecycle.end()
            for line in lines:
                self.note_end(line)
            self._explain(lines)
            self._say(f"    {self._trial_line()}")
        self._stop_waiting()
        self.finished = True
        return self.model

    def save(self, folder: str | Path) -> Path:
        """Write ``state_dict.pt`` and ``rebuild.py``, as ``GrowthResult.save`` does.

        Args:
            folder: made if it does not exist.

        Returns:
            the folder.

        Raises:
            UsageError: growth has not ended, so seeds may still be removed.
        """
        if not self.finished:
            raise UsageError(
                f"save: {len(self.history)} of {self.options.epochs} epochs are over; "
                "call finish() first, which decides about the seeds that are not fossilised"
            )
        from esper.own_models.written_code import save_grown

        return save_grown(self.model, folder, {})

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` needs to go on from here, as plain data and tensors.

        Module and optimizer are not part of it: they have a state_dict of their own. Growth that
        goes on equals growth that was never interrupted, bit for bit, if the training loop does.
        """
        return {
            "epochs": self.options.epochs,
            "policy": self._policy_name,
            "history": to_builtins(self.history),
            "finished": self.finished,
            "scale": self._scale.first,
            "lives": None if self._lifecycle is None else self._lifecycle.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where ``saved`` was taken; call it before the first epoch.

        It attaches the seeds to the module and gives them to the optimizer, so call it before the
        ``load_state_dict`` of these two.

        Args:
            saved: what ``state_dict`` returned, for a module built in the same way.

        Raises:
            UsageError: epochs or policy are others, or an epoch is already over.
        """
        if self.history:
            raise UsageError("load_state_dict: an epoch is already over; make a new Growth")
        for name, value in (("epochs", self.options.epochs), ("policy", self._policy_name)):
            if saved[name] != value:
                raise UsageError(f"{name}: growth began with {saved[name]}, got {value}; give that")
        self.history = convert(saved["history"], list[EpochRecord])
        self.finished, self._scale.first = saved["finished"], saved["scale"]
        if saved["lives"] is not None:
            self._stop_waiting()
            if self._lifecycle is None:
                slots = tuple(SlotSpec(**slot) for slot in saved["lives"]["slots"])
                self._create_lifecycle(slots)
            assert self._lifecycle is not None
            self._lifecycle.load_state_dict(saved["lives"])
            if self.finished:
                self._lifecycle.body.close()

    @property
    def _policy_name(self) -> str:
        policy = self.options.policy
        return policy if isinstance(policy, str) else type(policy).__name__

    def _called_with(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the first forward pass."""
        arguments = self._first_call.arguments if self._first_call else None
        if arguments is None:
            raise UsageError(
                "step: the module has not been called yet; train an epoch first, or give example="
            )
        return arguments

    def _stop_waiting(self) -> None:
        """Take off the hook that waits for a first call."""
        if self._first_call is not None:
            self._first_call.close()
        self._first_call = None

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the slots, and prepare the lifecycle."""
        from esper.own_models.slot_search import find_slots

        self._stop_waiting()
        with evaluating(self.model), buffers_kept(self.model):
            slots = find_slots(
                self.model, half_or_all(self.model, args, kwargs), self.options.slots
            )
        self._create_lifecycle(slots)
        self._say("slots: " + ", ".join(f"{slot.name} ({slot.channels})" for slot in slots))

    def _create_lifecycle(self, slots: tuple[SlotSpec, ...]) -> None:
        """Prepare the lifecycle of seeds in the slots."""
        from esper.own_models.grafted_model import GraftedModel
        from esper.own_models.lifecycle_controller import LifecycleController, actor

        options = self.options
        policy = actor(options.policy, slots, options.epochs, options.seed, self._say)
        body = GraftedModel(self.model, slots, self.optimizer, options.epochs, options.seed)
        self._lifecycle = LifecycleController(
            body, policy, lambda: self._validation(None), options.price, options.max_parameters,
            self.classes,
        )  # fmt: skip

    def _validation(self, score: "float | Validation | None") -> Validation:
        if score is None:
            if self.validate is None:
                raise UsageError("step: got no score; give one, or give validate= to Growth")
            with evaluating(self.model):
                score = self.validate()
        if isinstance(score, Validation):
            return score
        value = float(score)
        score = as_score(value, self.options.higher_is_better, self._scale)
        return Validation(max(1.0 - value, 0.0) if self.options.higher_is_better else value, score)

    def _say(self, message: str) -> None:
        if self.report is not None:
            self.report(message)


class FirstCall:
    """Forward pre-hook that keeps the arguments of a module's first call and removes itself.

    An object of this package and not a closure, so that a module that waits for its first call can
    be pickled and copied.

    Args:
        model: the module.

    Attributes:
        arguments: positional and keyword arguments; None before the call.
    """

    def __init__(self, model: nn.Module):
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See ``nn.Module.register_forward_pre_hook``."""
        self.arguments = args, kwargs
        self.close()

    def close(self) -> None:
        """Wait no longer."""
        self._handle.remove()


describe(Growth, GrowthOptions)
