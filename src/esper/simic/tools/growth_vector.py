"""Growing networks as Gymnasium environments, for learners other than Esper's.

``esper.register_envs()`` registers every task and suite as ``esper/NAME-v0``, for
``gymnasium.make_vec("esper/digits_shift-v0", num_envs=16)``.
"""

from typing import Any

import numpy as np
import torch
from gymnasium import Env, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS, CANONICAL_CHOICE, CHOICE_HEADS, HEAD_WIDTHS, Op
from esper.leyline.config import check, unflatten
from esper.leyline.errors import UsageError
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import Step
from esper.simic.training.setup import arithmetic, build_environment, resolve_devices
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import CRITIC_FEATURES, HOST_FEATURES, SLOT_FEATURES, Observation

Batch = Any
"""Observations of all environments: an array, or a dictionary of arrays."""

FREE_HEADS = CHOICE_HEADS[1:]
"""Heads whose options depend on no other head: all but op, slot and blueprint."""


def moves(slots: int) -> Tensor:
    """Every op with its slot and blueprint, int64 ``[moves, 3]``.

    These three heads depend on one another, so that independent masks could not describe which of
    their options are legal together.
    """
    canonical = CANONICAL_CHOICE["blueprint"]
    rows = [(int(Op.WAIT), CANONICAL_CHOICE["slot"], canonical)]
    for op in Op:
        if op == Op.GERMINATE:
            kinds = range(len(BLUEPRINTS))
            rows += [(int(op), slot, kind) for slot in range(slots) for kind in kinds]
        elif op != Op.WAIT:
            rows += [(int(op), slot, canonical) for slot in range(slots)]
    return torch.tensor(rows)


def move_masks(masks: ActionMasks, moves: Tensor) -> Tensor:
    """Which ``moves [M, 3]`` are legal, bool ``[N, M]``."""
    ops, slots, kinds = moves.unbind(1)
    legal = masks.slots[:, ops, slots]
    legal = torch.where(ops == Op.WAIT, masks.ops[:, ops], legal)
    return legal & (masks.kinds[:, slots, kinds] | (ops != Op.GERMINATE))


class GrowthVectorEnv(VectorEnv[Batch, NDArray[Any], NDArray[Any]]):
    """N growing networks, which are one tensor program, as a Gymnasium ``VectorEnv``.

    An action has six components: a move (an op with its slot and blueprint, see ``moves``), style,
    tempo, alpha target, alpha speed and alpha curve, of which a move uses those that concern it.
    ``infos["action_mask"]`` is bool ``[N, options]``, the masks of the components one after
    another; every action that it allows is legal. Another one changes nothing.

    All episodes end together, by termination. The next ones begin with the next step, whatever its
    actions, or in the same one: then its observation is theirs, and ``infos["final_obs"]`` has the
    final ones.

    Args:
        num_envs: number of environments N.
        task: name of a task or suite.
        observation: ``flat``, or ``dict`` for the features of host, slots and blueprints apart,
            and ``critic``, which Esper's policy does not see.
        autoreset_mode: ``NextStep`` or ``SameStep``.
        settings: settings of ``esper train ppo`` that concern the environments, such as
            ``max_batches=4`` or ``threads=2``.

    Attributes:
        growth: the growth environment of the current seed.

    Raises:
        UsageError: a setting is invalid.
    """

    def __init__(
        self,
        num_envs: int = 1,
        task: str = "digits_shift",
        observation: str = "flat",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        **settings: Any,
    ):
        if observation not in ("flat", "dict"):
            raise UsageError(f"observation: must be flat or dict, got {observation!r}")
        modes = {mode.value: mode for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)}
        mode = modes.get(getattr(autoreset_mode, "value", autoreset_mode))
        if mode is None:
            raise UsageError(f"autoreset_mode: must be {' or '.join(modes)}, got {autoreset_mode}")
        self.metadata = {"autoreset_mode": mode, "render_modes": []}
        self._same_step, self._over = mode == AutoresetMode.SAME_STEP, False
        if "seed" in settings:
            raise UsageError("seed: give it to reset")
        self.num_envs = num_envs
        self._settings = {"envs": num_envs, "task": [task], **settings}
        self._flat = observation == "flat"
        self.growth = self._build(0)
        self._moves = moves(self._slots)
        self._options = (len(self._moves), *(HEAD_WIDTHS[head] for head in FREE_HEADS))
        self.single_action_space = spaces.MultiDiscrete(list(self._options))
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.single_observation_space = self._space()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._episode: int | None = None

    def _build(self, seed: int) -> GrowthEnv:
        config = unflatten({**self._settings, "seed": seed})
        check(config)
        devices = resolve_devices(config.machine.devices or (config.machine.device,))
        self._threads = config.machine.threads or torch.get_num_threads()
        environment = build_environment(config, devices)
        self._seed = seed
        self._slots = max(len(task.host.slots) for task in environment.tasks)
        return environment

    def _space(self) -> spaces.Space[Any]:
        def box(*shape: int) -> spaces.Box:
            return spaces.Box(-np.inf, np.inf, shape, np.float32)

        slots, kinds = self._slots, len(BLUEPRINTS)
        if self._flat:
            return box(len(HOST_FEATURES) + slots * (len(SLOT_FEATURES) + kinds))
        return spaces.Dict(
            {
                "host": box(len(HOST_FEATURES)),
                "slots": box(slots, len(SLOT_FEATURES)),
                "blueprints": spaces.MultiDiscrete([kinds] * slots),
                "critic": box(len(CRITIC_FEATURES)),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Batch, dict[str, Any]]:
        """Begin the first episode of ``seed``, or the next one without a seed.

        Args:
            seed: seed of hosts, seeds and minibatches, in [0, 2^32).
            options: ignored.
        """
        super().reset(seed=seed)
        if seed is None and self._episode is None:
            seed = int(self.np_random.integers(2**32))
        if seed is not None:
            if seed != self._seed:
                self.growth = self._build(seed)
            self._episode = -1
        return self._begin()

    def _begin(self) -> tuple[Batch, dict[str, Any]]:
        assert self._episode is not None
        self._episode, self._over = self._episode + 1, False
        with arithmetic(self.growth.device, self._threads):
            observation = self.growth.reset(self._episode)
        return self.batch(observation), {"action_mask": self._masks(observation.masks)}

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[Batch, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Train every host for one epoch after its action.

        Args:
            actions: int ``[N, 6]``.

        Raises:
            ValueError: the actions have another shape, or an option does not exist.
        """
        if self._over:
            observation, info = self._begin()
            no = np.zeros(self.num_envs, np.bool_)
            return observation, np.zeros(self.num_envs), no, no.copy(), info
        step = self.advance(actions)
        observation, info = self.batch(step.observation), self.info(step)
        over = np.full(self.num_envs, step.done)
        self._over = step.done
        if step.done and self._same_step:
            everywhere = {"final_obs": self._apart(observation), "final_info": info}
            observation, info = self._begin()
            masks = {f"_{name}": over for name in everywhere}
            info |= everywhere | masks
        reward = step.reward.cpu().numpy().astype(np.float64)
        return observation, reward, over, np.zeros_like(over), info

    def advance(self, actions: NDArray[Any]) -> Step:
        """``step`` as the growth environment returns it, without a new episode at its end."""
        choices = torch.as_tensor(np.asarray(actions))
        shape = self.num_envs, len(self._options)
        if choices.shape != shape:
            raise ValueError(f"actions have shape {tuple(choices.shape)}, not {shape}")
        if bool(((choices < 0) | (choices >= torch.tensor(self._options))).any()):
            raise ValueError(f"actions have an option outside those of {self.single_action_space}")
        heads = torch.cat([self._moves[choices[:, 0]], choices[:, 1:].long()], 1)
        with arithmetic(self.growth.device, self._threads):
            return self.growth.step(heads.to(self.growth.device))

    def info(self, step: Step) -> dict[str, Any]:
        """``infos`` after a step: legal actions, and whether the actions took effect."""
        return {
            "action_mask": self._masks(step.observation.masks),
            "success": step.report.success.cpu().numpy(),
        }

    def batch(self, observation: Observation) -> Batch:
        """An observation of the growth environment as one of this environment."""
        missing = self._slots - observation.slots.shape[1]
        slots = torch.nn.functional.pad(observation.slots, (0, 0, 0, missing)).cpu()
        blueprints = torch.nn.functional.pad(observation.blueprints, (0, missing)).cpu()
        host = observation.host.cpu()
        if not self._flat:
            critic = observation.critic.cpu().float()
            tensors = {"host": host, "slots": slots, "blueprints": blueprints, "critic": critic}
            return {name: tensor.numpy() for name, tensor in tensors.items()}
        kinds = torch.nn.functional.one_hot(blueprints, len(BLUEPRINTS)).to(host.dtype)
        return torch.cat([host, torch.cat([slots, kinds], 2).flatten(1)], 1).numpy()

    def _apart(self, batch: Batch) -> NDArray[Any]:
        """The observations of a batch, one object each."""
        result = np.empty(self.num_envs, dtype=object)
        for i in range(self.num_envs):
            result[i] = {k: x[i] for k, x in batch.items()} if not self._flat else batch[i]
        return result

    def _masks(self, masks: ActionMasks) -> NDArray[np.bool_]:
        missing = self._slots - masks.kinds.shape[1]
        wide = ActionMasks(
            torch.nn.functional.pad(masks.slots, (0, missing)).cpu(),
            torch.nn.functional.pad(masks.kinds, (0, 0, 0, missing)).cpu(),
        )
        every = torch.ones(self.num_envs, sum(self._options[1:]), dtype=torch.bool)
        return torch.cat([move_masks(wide, self._moves), every], 1).numpy()


class GrowthSingleEnv(Env[Any, NDArray[Any]]):
    """One growing network as a Gymnasium ``Env``; see ``GrowthVectorEnv`` for its arguments."""

    def __init__(self, **arguments: Any):
        self._vector = GrowthVectorEnv(1, **{"group_size": 1, **arguments})
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """See ``GrowthVectorEnv.reset``."""
        super().reset(seed=seed)
        observation, info = self._vector.reset(seed=seed)
        return self._only(observation), {name: x[0] for name, x in info.items()}

    def step(self, action: NDArray[Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See ``GrowthVectorEnv.step``; the next episode begins with ``reset``."""
        step = self._vector.advance(np.asarray(action)[None])
        info = {name: x[0] for name, x in self._vector.info(step).items()}
        observation = self._only(self._vector.batch(step.observation))
        return observation, float(step.reward[0]), step.done, False, info

    def _only(self, batch: Batch) -> Any:
        return {k: x[0] for k, x in batch.items()} if isinstance(batch, dict) else batch[0]
