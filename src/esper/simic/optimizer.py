"""Adam for a policy: separate learning rates for actor and critic, steps skipped on the device."""

from typing import Any

import torch
from torch import Tensor, nn

from esper.tamiyo.policy.interface import Policy

GROUPS = ("policy", "value")


class PolicyOptimizer:
    """Adam (Kingma and Ba, 2015) with steps that the device can skip without the CPU's help.

    Learning rates are tensors on the device, so a captured or compiled step follows a schedule. If
    ``found_inf`` is set, as a GradScaler sets it, the fused kernel of ``torch.optim.Adam`` leaves
    parameters, moments and step count unchanged, without a transfer to the CPU. It is called
    directly: what torch's class does around it costs more than the kernel at the size of a policy.

    Args:
        policy: policy whose parameters are optimised.
        device: device of the parameters.
        apart: whether actor and critic have rates of their own; if not, one call steps both.
    """

    def __init__(self, policy: Policy[Any], device: torch.device, apart: bool = True):
        critic = policy.head_parameters("value")
        of_critic = {id(parameter) for parameter in critic}
        actor = [p for p in policy.parameters() if id(p) not in of_critic]
        self.parameters = [*actor, *critic]
        names = {id(parameter): name for name, parameter in policy.named_parameters()}
        self.names = [names[id(parameter)] for parameter in self.parameters]
        self.rates = {name: torch.zeros((), device=device) for name in GROUPS}
        self.groups = {"policy": actor, "value": critic} if apart else {"policy": self.parameters}
        self.states: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def set_rates(self, rates: dict[str, float | Tensor]) -> None:
        """Set the learning rates of the following steps, by group."""
        for name, rate in self.rates.items():
            rate.fill_(rates[name])

    @torch.no_grad()
    def step_unless(self, skip: Tensor) -> None:
        """Take a step unless ``skip``, a float scalar on the device, is 1 rather than 0."""
        for name, group in self.groups.items():
            parameters: list[Tensor] = [p for p in group if p.grad is not None]
            if not parameters:
                continue
            states = [self.states.get(p) or self._begin(p) for p in parameters]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                parameters,
                [p.grad for p in parameters if p.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=self.rates[name],
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.0,
                eps=1e-5,
                amsgrad=False,
                maximize=False,
                found_inf=skip,
            )
            torch._foreach_sub_(steps, [skip] * len(steps))

    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros_like(parameter)
        step = torch.zeros((), device=parameter.device)
        state = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        return self.states.setdefault(parameter, state)

    def finite(self) -> Tensor:
        """Whether every parameter and every moment is finite, bool scalar on the device.

        A parameter that no loss depends on in this update would otherwise go unnoticed into
        checkpoints.
        """
        moments = [x for state in self.states.values() for x in state.values() if x.ndim]
        return nn.utils.get_total_norm(
            [*(p.detach() for p in self.parameters), *moments]
        ).isfinite()

    def state(self) -> dict[str, dict[str, Any]]:
        """Moments and step counts by parameter name, independent of the order of the groups."""
        return {
            name: dict(self.states[parameter])
            for name, parameter in zip(self.names, self.parameters, strict=True)
            if parameter in self.states
        }

    def load(self, states: dict[str, dict[str, Any]]) -> None:
        """Restore what ``state`` returned.

        Raises:
            KeyError: it contains a parameter that the policy does not have.
            ValueError: a moment has another shape.
        """
        unknown = set(states) - set(self.names)
        if unknown:
            raise KeyError(f"the policy has no parameter {sorted(unknown)[0]}")
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if name not in states:
                self.states.pop(parameter, None)
                continue
            for key, value in states[name].items():
                if key != "step" and value.shape != parameter.shape:
                    raise ValueError(f"{name}: {key} has shape {tuple(value.shape)}")
            moments = {key: x.clone().to(parameter.device) for key, x in states[name].items()}
            self.states[parameter] = moments
