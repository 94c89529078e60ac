"""What ``Growth`` accepts: every refusal is one line that says what to do."""

from math import isfinite

import torch
from torch import nn
from torch.optim import Optimizer

from esper.leyline.errors import UsageError
from esper.own_models.attachment import grown_seeds
from esper.own_models.grafted_model import parameter_count
from esper.own_models.optimizer_watch import updates


def check_arguments(
    model: nn.Module, optimizer: Optimizer | None, epochs: int, price: float, most: int | None
) -> None:
    """Refuse what cannot grow; see ``Growth`` for the arguments.

    Raises:
        UsageError: an argument is not valid; the text says which and what to do.
    """
    check_model(model)
    if optimizer is not None:
        check_optimizer(model, optimizer)
    if not isinstance(epochs, int) or epochs < 1:
        raise UsageError(f"epochs: got {epochs!r}; give a whole number from 1")
    if not (price >= 0.0 and isfinite(price)):
        raise UsageError(f"price: got {price!r}; give a number from 0")
    count = parameter_count(model)
    if most is not None and most < count:
        raise UsageError(f"max_parameters: the module has {count:,} already; give more than that")


def check_model(model: nn.Module) -> None:
    """Refuse a module that cannot grow, before anything touches it.

    Raises:
        UsageError: it has seeds or lazy layers, is compiled, scripted or wrapped, or has nothing
            to train; the text says what to do.
    """
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
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("model: no parameter requires a gradient; unfreeze some")


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot train the seeds of ``model``.

    Raises:
        UsageError: it cannot; the text says why and what to do.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "optimizer: LBFGS keeps one state for all parameters, so no seed can join; use another"
        )
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        raise UsageError(
            "optimizer: Muon updates matrices alone, and seeds have vectors too; use another"
        )
    if not updates(optimizer, model):
        raise UsageError("optimizer: it has no parameter of the model; build it from this model's")
