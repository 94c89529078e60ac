"""Adam for a policy: separate learning rates for actor and critic, steps skipped on the device."""

from typing import Any

import torch
from torch import Tensor, nn

from esper.tamiyo.policy.interface import Policy

GROUPS = ("policy", "value")


class PolicyOptimizer:
    """Adam (Kingma and Ba, 2015) with steps that the device can skip without the CPU's help.

    Learning rates are tensors on the device, so a captured or compiled step follows a schedule. If
    ``found_inf`` is set, as a GradScaler sets it, the fused kernel leaves parameters, moments and
    step count unchanged, without a transfer to the CPU. The foreach kernels have no such flag, so
    a skipped step is undone by copying the tensors back.

    Args:
        policy: policy whose parameters are optimised.
        device: device of the parameters.
        fused: whether to use the fused kernel rather than the foreach kernels; by default if there
            is one for the device.
        apart: whether actor and critic have rates of their own; if not, one call steps both.
    """

    def __init__(
        self,
        policy: Policy[Any],
        device: torch.device,
        fused: bool | None = None,
        apart: bool = True,
    ):
        critic = policy.head_parameters("value")
        of_critic = {id(parameter) for parameter in critic}
        actor = [p for p in policy.parameters() if id(p) not in of_critic]
        self.parameters = [*actor, *critic]
        names = {id(parameter): name for name, parameter in policy.named_parameters()}
        self.names = [names[id(parameter)] for parameter in self.parameters]
        self.rates = {name: torch.zeros((), device=device) for name in GROUPS}
        self.fused = fused = _has_fused(self.parameters) if fused is None else fused
        rates = [self.rates[name] if fused else 0.0 for name in GROUPS]
        groups = zip((actor, critic) if apart else (self.parameters,), rates, strict=apart)
        self.adam = torch.optim.Adam(
            [{"params": parameters, "lr": rate} for parameters, rate in groups],
            eps=1e-5,
            fused=fused or None,
            foreach=None if fused else True,
            capturable=device.type == "cuda",
        )

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        self.adam.zero_grad(set_to_none=True)

    def set_rates(self, rates: dict[str, float | Tensor]) -> None:
        """Set the learning rates of the following steps, by group."""
        for name, rate in self.rates.items():
            rate.fill_(rates[name])
        if not self.fused:  # the foreach kernels on a CPU need a Python number
            for name, group in zip(GROUPS, self.adam.param_groups, strict=False):
                group["lr"] = float(self.rates[name])

    def step_unless(self, skip: Tensor) -> None:
        """Take a step unless ``skip`` (a float scalar on the device) is above 0."""
        if self.fused:
            self.adam.found_inf = skip  # type: ignore[attr-defined]
            self.adam.grad_scale = None  # type: ignore[attr-defined]
            self.adam.step()
            return
        # Adam creates its state in the first step: a skipped first step restores zeros.
        before = {name: x.clone() for name, x in self._tensors().items()}
        self.adam.step()
        with torch.no_grad():
            for name, x in self._tensors().items():
                x.copy_(torch.where(skip > 0, before.get(name, torch.zeros_like(x)), x))

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            tensors[name] = parameter.detach()
            for key, value in self.adam.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value
        return tensors

    def finite(self) -> Tensor:
        """Whether every parameter and every moment is finite, bool scalar on the device.

        A parameter that no loss depends on in this update would otherwise go unnoticed into
        checkpoints.
        """
        moments = [x for state in self.adam.state.values() for x in state.values() if x.ndim]
        return nn.utils.get_total_norm(
            [*(p.detach() for p in self.parameters), *moments]
        ).isfinite()

    def state(self) -> dict[str, dict[str, Any]]:
        """Moments and step counts by parameter name, independent of the order of the groups."""
        return {
            name: dict(self.adam.state[parameter])
            for name, parameter in zip(self.names, self.parameters, strict=True)
            if parameter in self.adam.state
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
                self.adam.state.pop(parameter, None)
                continue
            for key, value in states[name].items():
                if key != "step" and value.shape != parameter.shape:
                    raise ValueError(f"{name}: {key} has shape {tuple(value.shape)}")
            self.adam.state[parameter] = {
                key: value.clone().to(parameter.device if key != "step" or self.fused else "cpu")
                for key, value in states[name].items()
            }


def _has_fused(parameters: list[nn.Parameter]) -> bool:
    """Whether there is a fused kernel for the parameters; torch tells by an error."""
    try:
        torch.optim.Adam(parameters, fused=True)
    except RuntimeError:
        return False
    return True
