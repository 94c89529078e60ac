"""Faults of the learner."""

from mutants import Table

LEARNING = (
    Table(
        "gradients",
        "src/esper/simic/gradients.py",
        ("tests/simic/test_ppo.py", "tests/simic/test_trainer.py"),
        (
            (
                "gradients are not clipped",
                "    norms.clip(norm, max_norm)\n",
                "",
            ),
        ),
    ),
    Table(
        "ppo",
        "src/esper/simic/ppo.py",
        ("tests/simic/test_ppo.py",),
        (
            (
                "the same minibatches in every update",
                "random_bits(self.seed, streams, Purpose.POLICY_SHUFFLE, self.updates, "
                "0, sequences)",
                "random_bits(self.seed, streams, Purpose.POLICY_SHUFFLE, 0, 0, sequences)",
            ),
            (
                "the same minibatches in every epoch",
                "streams = torch.arange(self.config.ppo_epochs)",
                "streams = torch.zeros(self.config.ppo_epochs, dtype=torch.long)",
            ),
            (
                "KL stops a hundred times too late",
                "1.5 * self.config.target_kl).float()",
                "150.0 * self.config.target_kl).float()",
            ),
            (
                "KL stops too early",
                "1.5 * self.config.target_kl).float()",
                "0.5 * self.config.target_kl).float()",
            ),
            (
                "a refused step is taken",
                "stop = torch.maximum(stop, torch.maximum(refusal, beyond_kl))",
                "stop = torch.maximum(stop, beyond_kl)",
            ),
            (
                "a stop lasts one minibatch",
                "stop = torch.maximum(stop, torch.maximum(refusal, beyond_kl))",
                "stop = torch.maximum(refusal, beyond_kl)",
            ),
            (
                "an overflow is taken",
                "self.optimizer.step_unless(torch.maximum(stop, overflow))",
                "self.optimizer.step_unless(stop)",
            ),
            (
                "inputs are not checked",
                "return (~finite).float()",
                "return (~finite).float() * 0.0",
            ),
            (
                "the critic learns at the actor's rate",
                '"value": schedules.value_rate}',
                '"value": schedules.policy_rate}',
            ),
            (
                "the adaptive factor is not used",
                "rate.at(update) * factor for",
                "rate.at(update) for",
            ),
            (
                "schedules run one update ahead",
                "schedules, update = self.schedules, self.updates",
                "schedules, update = self.schedules, self.updates + 1",
            ),
            (
                "the clip range is not scheduled",
                "fill_(schedules.clip.at(update))",
                "fill_(schedules.clip.at(0))",
            ),
            (
                "the entropy weight is not scheduled",
                "fill_(schedules.entropy.at(update))",
                "fill_(schedules.entropy.at(0))",
            ),
            (
                "the rate adapts to all epochs",
                "last = metrics[-len(metrics) // self.config.ppo_epochs :]",
                "last = metrics",
            ),
            (
                "the value layer keeps its bias",
                "layer.bias.copy_((bias / moments.deviation).to(layer.bias.dtype))",
                "layer.bias.copy_(bias.to(layer.bias.dtype))",
            ),
            (
                "the value layer keeps its weight",
                "        layer.weight.mul_((old_deviation / "
                "moments.deviation).to(layer.weight.dtype))\n",
                "",
            ),
            (
                "moments do not learn",
                "        self.moments.update(rollout.observation, rollout.valid)\n",
                "",
            ),
            (
                "steps that only reset count",
                'return torch.where(rollout.valid.to(self.device), x, float("nan"))',
                "return x",
            ),
            (
                "a checkpoint forgets the count of updates",
                'self.updates = int(parts["counters"]["updates"])',
                "self.updates = 0",
            ),
            (
                "a checkpoint forgets the factor of the rate",
                '            self.adaptive.factor.copy_(parts["counters"]["rate_factor"])\n',
                "            pass\n",
            ),
            (
                "a checkpoint forgets the optimizer",
                '        self.optimizer.load(parts["optimizer"])\n',
                "",
            ),
        ),
    ),
    Table(
        "loss",
        "src/esper/simic/loss.py",
        ("tests/simic/test_loss.py",),
        (
            (
                "KL estimator: another divergence",
                "weighted_mean(torch.expm1(log_ratio) - log_ratio, weight)",
                "weighted_mean(-log_ratio, weight)",
            ),
            (
                "KL estimator: a square",
                "weighted_mean(torch.expm1(log_ratio) - log_ratio, weight)",
                "weighted_mean(0.5 * log_ratio.square(), weight)",
            ),
            (
                "the larger of the two surrogates",
                "-weighted_mean(torch.minimum(surrogate, clipped_surrogate), weight)",
                "-weighted_mean(torch.maximum(surrogate, clipped_surrogate), weight)",
            ),
            (
                "reward sign of the surrogate",
                "policy_loss = -weighted_mean(",
                "policy_loss = weighted_mean(",
            ),
            (
                "entropy is punished",
                "- entropy_weight * entropy\n",
                "+ entropy_weight * entropy\n",
            ),
            (
                "gradient of the entropy has the wrong sign",
                "(-entropy_weight * share)",
                "(entropy_weight * share)",
            ),
            (
                "value error without its half",
                "0.5 * weighted_mean(error.square(), weight)",
                "weighted_mean(error.square(), weight)",
            ),
            (
                "no weight of the critic",
                "policy_loss + value_weight * value_loss",
                "policy_loss + value_loss",
            ),
            (
                "the critic's gradient is not weighted",
                "error * (value_weight * share)",
                "error * share",
            ),
            (
                "clipped steps learn",
                ".masked_fill(surrogate > clipped_surrogate, 0.0)",
                "",
            ),
            (
                "steps at the bound learn nothing",
                "masked_fill(surrogate > clipped_surrogate, 0.0)",
                "masked_fill(surrogate >= clipped_surrogate, 0.0)",
            ),
            (
                "the mask is missing in the update",
                "log_ratio = torch.where(weight > 0, log_ratio, 0.0)",
                "log_ratio = log_ratio * 1.0",
            ),
            (
                "padding counts in the mean of gradients",
                "else weight / weight.sum()",
                "else weight / surrogate.numel()",
            ),
            (
                "the lower bound is not clipped",
                "torch.minimum(torch.maximum(ratio, 1.0 - clip), 1.0 + clip)",
                "torch.minimum(ratio, 1.0 + clip)",
            ),
            (
                "the clip fraction counts all",
                "((ratio - 1.0).abs() > clip).float()",
                "((ratio - 1.0).abs() >= 0.0).float()",
            ),
            (
                "the outer gradient is ignored",
                "(scale * part for part in ctx.saved_tensors)",
                "(part for part in ctx.saved_tensors)",
            ),
        ),
    ),
    Table(
        "advantage",
        "src/esper/simic/advantage.py",
        ("tests/simic/test_advantage.py",),
        (
            (
                "GAE end: a terminated step has a future",
                "alive = (~terminated).to(values.dtype)",
                "alive = torch.ones_like(values)",
            ),
            (
                "advantages flow over the end of an episode",
                "discount * trace_decay * continues[t] * advantage",
                "discount * trace_decay * advantage",
            ),
            (
                "a truncated step is a terminated one",
                "rewards + discount * next_values * alive - values, continues",
                "rewards + discount * next_values * continues - values, continues",
            ),
            (
                "a truncated step continues",
                "(~(terminated | truncated)).to(values.dtype)",
                "(~terminated).to(values.dtype)",
            ),
            (
                "no discount of the trace",
                "deltas[t] + discount * trace_decay *",
                "deltas[t] + trace_decay *",
            ),
            (
                "no decay of the trace",
                "deltas[t] + discount * trace_decay *",
                "deltas[t] + discount *",
            ),
            (
                "the last value is left out",
                "torch.cat([values[1:], last_value[None]])",
                "torch.cat([values[1:], torch.zeros_like(last_value)[None]])",
            ),
            (
                "returns are advantages",
                "return advantages, advantages + values",
                "return advantages, advantages",
            ),
            (
                "T and N: steps run forwards",
                "for t in reversed(range(len(rewards))):",
                "for t in range(len(rewards)):",
            ),
            (
                "no discount of the next value",
                "rewards + discount * next_values",
                "rewards + next_values",
            ),
            (
                "the mean of the whole group",
                "(differences * (group_size / (group_size - 1)))",
                "differences",
            ),
            (
                "groups are strided",
                "advantages.view(steps, -1, group_size)",
                "advantages.view(steps, group_size, -1).transpose(1, 2)",
            ),
            (
                "explained variance without the mean",
                "return ((x - mean) * counts).square().sum()",
                "return (x * counts).square().sum()",
            ),
            (
                "explained variance within environments",
                "return share((0, 1)), share((1,))",
                "return share((0, 1)), share((0,))",
            ),
        ),
    ),
)
