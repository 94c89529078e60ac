"""The naive baseline: one ordinary module per environment, in a Python loop.

It implements the same interface as Esper's backends, so that everything around it (policy,
lifecycle, reward, update, telemetry) is the same in both loops that are timed.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.hosts.host import Host
from esper.kasmina.stack import Layout
from esper.leyline.actions import BLUEPRINTS, Style
from esper.tolaria.backends import HeldBack, Minibatches, Optimisation, Variant
from esper.tolaria.plan import Seeds
from esper.tolaria.results import SLOT_MEASURES, EpochResult, Scores
from esper.tolaria.stores import Stack

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from oracles.naive import (
    NaiveHost,
    NaiveSeed,
    SelfAttention,
    SequenceAttention,
    naive_host,
    pixels,
    positions,
)

Modules = tuple[NaiveHost, dict[str, NaiveSeed]]
Optimizers = dict[str, torch.optim.AdamW]


class Seed(NaiveSeed):
    """A naive seed that avoids a crash of torch 2.13: the backward pass of its group norm fails for
    a channels_last input without gradient, so an isolated seed gets a contiguous input."""

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        """Apply the seed to ``x``."""
        if self.alpha != 0.0 or source is not None:
            return super().forward(x, source)
        branch = self.contribution(x.detach().clone(memory_format=torch.contiguous_format))
        return x + (branch - branch.detach())


class FusedAttention(SelfAttention):
    """The causal attention of a naive module, in one call."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend to ``x [B, T, C]``."""
        joint = self.joint(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = joint.unbind(0)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out


class FusedSequenceAttention(FusedAttention):
    """The attention of a naive seed, in one call."""

    norm: nn.LayerNorm

    def forward(self, x: Tensor) -> Tensor:
        """Attend to ``x [B, C, 1, T]``."""
        out: Tensor = pixels(super().forward(self.norm(positions(x))))
        return out


FUSED = {SelfAttention: FusedAttention, SequenceAttention: FusedSequenceAttention}


def flattened(module: nn.Module) -> nn.Parameter:
    """One parameter of which all parameters of ``module`` become views, and its gradients too."""
    parameters = list(module.parameters())
    flat = nn.Parameter(torch.zeros(sum(p.numel() for p in parameters)))
    flat.grad = torch.zeros_like(flat)
    begin = 0
    for p in parameters:
        # Their strides stay: those of convolutions may have the channels last.
        place = p.shape, p.stride(), begin
        begin += p.numel()
        p.data = flat.detach().as_strided(*place).copy_(p)
        p.grad = flat.grad.as_strided(*place)
    return flat


def scored(
    module: NaiveHost, living: dict[str, NaiveSeed], images: Tensor, labels: Tensor, reduction: str
) -> tuple[Tensor, Tensor]:
    """The logits ``[B, classes]`` of a host with its living seeds, and their cross-entropy."""
    logits = module(images, living)
    return logits, F.cross_entropy(logits, labels, reduction=reduction)


def compiled_scored() -> Callable[..., tuple[Tensor, Tensor]]:
    """Compile ``scored`` for every combination of seeds, of which there are more than eight."""
    torch._dynamo.config.recompile_limit = 256
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(scored, dynamic=False)
    return compiled


class NaiveBackend:
    """Implements ``tolaria.backends.Backend`` with a loop over modules.

    Parameters live in the stack between epochs, so that germination and rollback work as usual;
    copying them costs a thousandth of an epoch.

    Args:
        host: the host of all environments.
        threads: number of torch threads.
        channels_last: whether images and weights have their channels last in memory.
        half: whether the modules run under autocast to bfloat16.
        flat: whether the optimizer steps one parameter, of which those of a module are views.
        compiled: whether ``torch.compile`` compiles the modules with their losses.
    """

    name = "naive"
    uses_all_threads = True

    def __init__(
        self,
        host: Host,
        threads: int = 1,
        channels_last: bool = False,
        half: bool = False,
        flat: bool = False,
        compiled: bool = False,
    ):
        self.host, self.threads, self.half, self.flat = host, threads, half, flat
        self.scored = compiled_scored() if compiled else scored
        self.flattened: dict[nn.Module, nn.Parameter] = {}
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.modules: dict[tuple[object, ...], Modules] = {}
        self.optimizers: dict[int, Optimizers] = {}

    def train_epoch(
        self, stack: Stack, seeds: Seeds, minibatches: Minibatches, optimisation: Optimisation
    ) -> EpochResult:
        """See ``Backend.train_epoch``."""
        torch.set_num_threads(self.threads)
        rows, slots = seeds.alpha.shape
        like = stack.host
        nan = float("nan")
        result = EpochResult(
            like.new_zeros(rows),
            like.new_zeros(rows),
            like.new_zeros(rows),
            like.new_full((rows, slots), nan),
            [like.new_full((rows, slot.segment_count), nan) for slot in self.host.slots],
            # The loop does not measure empty slots, so a comparison with it is in its favour.
            like.new_full((rows, slots, len(SLOT_MEASURES)), nan),
        )
        for n in range(rows):
            self._train(n, stack, seeds, minibatches, optimisation, result)
        torch.set_num_threads(1)
        return result

    def _train(
        self,
        n: int,
        stack: Stack,
        seeds: Seeds,
        minibatches: Minibatches,
        optimisation: Optimisation,
        result: EpochResult,
    ) -> None:
        module, living = self._loaded(n, n, stack, seeds)
        optimizers = self._optimizers(n, module, living, stack, optimisation)
        module.train()
        losses, hits = [], []
        group = n if minibatches.group is None else int(minibatches.group[n])
        for batch, drawn in enumerate(minibatches.drawn[group]):
            images = minibatches.images[drawn]
            if minibatches.augmentation is not None and minibatches.poses is not None:
                poses = minibatches.poses[group, batch]
                images = minibatches.augmentation.apply(images, poses)
            images = images.permute(0, 3, 1, 2)
            images = images.contiguous(memory_format=self.format)
            labels = minibatches.labels[drawn].flatten()
            for optimizer in optimizers.values():
                optimizer.zero_grad(set_to_none=not self.flat)
            with torch.autocast(images.device.type, torch.bfloat16, enabled=self.half):
                logits, loss = self.scored(module, living, images, labels, "mean")
            loss.backward()
            for name, part in {"": module, **living}.items():
                norm = nn.utils.clip_grad_norm_(
                    self._parameters(part), optimisation.max_gradient_norm
                )
                if not name:
                    result.host_gradient_norm[n] = norm
                optimizers[name].step()
            losses.append(loss.detach())
            hits.append((logits.detach().argmax(1) == labels).float().mean())
        result.loss[n] = torch.stack(losses).mean()
        result.accuracy[n] = torch.stack(hits).mean()
        for s, slot in enumerate(self.host.slots):
            if slot.name in living:
                gradients = [p.grad for p in living[slot.name].named().values()]
                norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients])
                result.seed_tensor_norms[s][n, : len(norms)] = norms
                result.seed_gradient_norm[n, s] = torch.linalg.vector_norm(norms)
        self._stored(n, stack, module, living, len(losses))

    @torch.no_grad()
    def evaluate(
        self,
        stack: Stack,
        seeds: Seeds,
        held_back: HeldBack,
        variants: list[Variant],
        rows: Tensor | None = None,
    ) -> tuple[Scores, list[Scores]]:
        """See ``Backend.evaluate``."""
        torch.set_num_threads(self.threads)
        everyone = torch.arange(len(seeds.alpha), device=seeds.alpha.device)
        found = []
        for asked in (Variant(0, everyone, seeds.alpha), *variants):
            of_variant = seeds.of_variant(asked)
            scores = []
            for i, r in enumerate(asked.rows.tolist()):
                row = r if rows is None else int(rows[r])
                data = int(held_back.dataset[r])
                images = held_back.images[data].permute(0, 3, 1, 2)
                module, living = self._loaded(row, i, stack, of_variant)
                module.eval()
                images = images.contiguous(memory_format=self.format)
                labels = held_back.labels[data].flatten()
                with torch.autocast(images.device.type, torch.bfloat16, enabled=self.half):
                    logits, loss = self.scored(module, living, images, labels, "none")
                    log_likelihood = -loss
                hits = (logits.argmax(1) == labels).float()
                scores.append(
                    torch.stack([-log_likelihood.mean(), hits.mean(), log_likelihood.exp().mean()])
                )
            found.append(Scores(*torch.stack(scores).unbind(1)))
        torch.set_num_threads(1)
        return found[0], found[1:]

    @torch.no_grad()
    def _loaded(self, row: int, index: int, stack: Stack, seeds: Seeds) -> Modules:
        """The modules of a row of the stack, with the seeds of ``seeds[index]``."""
        alphas, kinds, styles = (
            x[index].tolist() for x in (seeds.alpha, seeds.blueprint, seeds.style)
        )
        computed = seeds.computed[index].tolist()
        alive = [s for s, here in enumerate(computed) if here]
        key = (row, *((s, kinds[s], styles[s]) for s in alive))
        if key not in self.modules:
            module = naive_host(self.host)
            living: dict[str, NaiveSeed] = {
                self.host.slots[s].name: Seed(
                    self.host,
                    BLUEPRINTS[kinds[s]],
                    Style(styles[s]),
                    self.host.slots[s],
                    0.0,
                    False,
                )
                for s in alive
            }
            for part in (module, *living.values()):
                part.to(stack.host.device)
                part.to(memory_format=self.format)  # type: ignore[call-overload]
                for layer in part.modules():
                    layer.__class__ = FUSED.get(type(layer), type(layer))
                if self.flat:
                    self.flattened[part] = flattened(part)
            self.modules[key] = module, living
        module, living = self.modules[key]
        for s in alive:
            living[self.host.slots[s].name].alpha = alphas[s]
        for tensors, layout, store in self._places(row, stack, module, living):
            for name, view in layout.views(store[row : row + 1]).items():
                if name in tensors:
                    tensors[name].copy_(view[0])
        return module, living

    @torch.no_grad()
    def _stored(
        self, row: int, stack: Stack, module: NaiveHost, living: dict[str, NaiveSeed], steps: int
    ) -> None:
        """Write the learned parameters into the stack."""
        for tensors, layout, store in self._places(row, stack, module, living):
            for name, view in layout.views(store[row : row + 1]).items():
                if name in tensors:
                    view[0].copy_(tensors[name])
        stack.host_optimizer.step[row] += steps
        for s, slot in enumerate(self.host.slots):
            if slot.name in living:
                stack.seed_optimizers[s].step[row] += steps

    def _parameters(self, part: nn.Module) -> list[nn.Parameter]:
        return [self.flattened[part]] if self.flat else list(part.parameters())

    def _places(
        self, row: int, stack: Stack, module: NaiveHost, living: dict[str, NaiveSeed]
    ) -> list[tuple[dict[str, Tensor], Layout, Tensor]]:
        """Named tensors of the modules, and their places in the stack."""
        places: list[tuple[dict[str, Tensor], Layout, Tensor]] = [
            (dict(module.named_parameters()), self.host.layout, stack.host),
            (module.statistics(), self.host.buffers, stack.buffers),
        ]
        for s, slot in enumerate(self.host.slots):
            if slot.name in living:
                seed = living[slot.name]
                layout = slot.layouts[BLUEPRINTS.index(seed.blueprint)]
                places.append((dict(seed.named()), layout, stack.seeds[s]))
        return places

    def _optimizers(
        self,
        row: int,
        module: NaiveHost,
        living: dict[str, NaiveSeed],
        stack: Stack,
        optimisation: Optimisation,
    ) -> Optimizers:
        """Fused AdamW of the host and of each seed, by name, with the moments of the stack."""
        own = self.optimizers.setdefault(row, {})
        rates = {"": float(optimisation.host_learning_rate[row])}
        counts = {"": float(stack.host_optimizer.step[row])}
        for s, slot in enumerate(self.host.slots):
            rates[slot.name] = float(optimisation.seed_learning_rate[row, s])
            counts[slot.name] = float(stack.seed_optimizers[s].step[row])
        for name, part in {"": module, **living}.items():
            parameters = self._parameters(part)
            same = name in own and own[name].param_groups[0]["params"][0] is parameters[0]
            if not same or counts[name] == 0:
                decay = 0.0 if name else optimisation.weight_decay
                fresh = torch.optim.AdamW(
                    parameters, lr=rates[name], weight_decay=decay, fused=True
                )
                if counts[name] and name in own:
                    before = own[name].param_groups[0]["params"]
                    for old, new in zip(before, parameters, strict=True):
                        fresh.state[new] = own[name].state[old]
                own[name] = fresh
            own[name].param_groups[0]["lr"] = rates[name]
        return own
