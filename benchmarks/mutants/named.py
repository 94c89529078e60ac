"""Faults that a review found unnoticed, or asked about, outside the files of the other tables."""

from mutants import Table

NAMED = (
    Table(
        "named",
        "src/esper/simic/schedules.py",
        ("tests/simic/test_schedules.py",),
        (
            (
                "adaptive rate's bound: upper",
                "(kl < 0.5 * self.target) & kl.isfinite()",
                "(kl < 5.0 * self.target) & kl.isfinite()",
            ),
            (
                "adaptive rate's bound: lower",
                "down, up = kl > 2.0 * self.target",
                "down, up = kl > 20.0 * self.target",
            ),
            (
                "adaptive rate's bound: of the factor",
                ".clamp_(self.MIN_FACTOR, self.MAX_FACTOR)",
                "",
            ),
            (
                "schedule's offset",
                "done = min(update - self.warmup, span)",
                "done = min(update, span)",
            ),
            (
                "schedule's offset: warmup",
                "self.initial * (update + 1) / self.warmup",
                "self.initial * update / self.warmup",
            ),
            (
                "the value rate is the policy's",
                "config.value_learning_rate or config.learning_rate",
                "config.learning_rate",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/nissa/hub.py",
        ("tests/nissa/test_hub.py",),
        (
            (
                "dropped-telemetry count: of steps",
                "steps = total - self._drops_reported",
                "steps = total",
            ),
            (
                "dropped-telemetry count: in total",
                "steps=steps, total=total)",
                "steps=steps, total=1)",
            ),
            (
                "dropped-telemetry count: never",
                "        self.drop_count += 1\n        if",
                "        if",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/leyline/disk.py",
        ("tests/simic/run/test_checkpoint.py",),
        (
            (
                "directory sync: nothing is flushed",
                "        os.fsync(descriptor)\n",
                "        pass\n",
            ),
            ("files are not flushed", "        os.fsync(file.fileno())\n", ""),
        ),
    ),
    Table(
        "named",
        "src/esper/simic/training/session.py",
        ("tests/simic/training/test_run.py", "tests/simic/run/test_torture.py"),
        (
            (
                "event before save",
                "            path = save(self.directory.path, number, parts, size, "
                "keep, identity, features)\n",
                "            hub.emit(CheckpointSaved(time=time.time(), round=number, "
                "path='early'))\n"
                "            hub.flush()\n"
                "            path = save(self.directory.path, number, parts, size, "
                "keep, identity, features)\n",
            ),
            (
                "a round is announced before it is saved",
                "                    if number % self.config.output.checkpoint_every "
                "== 0 or number == total:\n"
                "                        self._save(hub, number)\n"
                "                    # After saving, so that a reported round is not "
                "lost if the process dies.\n"
                "                    self.observer.round_done(summaries[-1])\n",
                "                    self.observer.round_done(summaries[-1])\n"
                "                    if number % self.config.output.checkpoint_every "
                "== 0 or number == total:\n"
                "                        self._save(hub, number)\n",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/tolaria/governor.py",
        ("tests/tolaria/test_governor.py",),
        (
            (
                "snapshot of a sick host",
                "[rows & self.healthy] * len(hosts)",
                "[rows] * len(hosts)",
            ),
            (
                "seeds of sick hosts get no snapshot",
                "+ [rows] * len(stack.seeds)",
                "+ [rows & self.healthy] * len(stack.seeds)",
            ),
            (
                "governor's window: sick losses",
                "torch.where(self.healthy[:, None], grown, self.losses)",
                "grown",
            ),
            ("governor's window: too long", "count >= MIN_HISTORY", "count > MIN_HISTORY"),
            ("strikes are not reset", "self.strikes = self.strikes.masked_fill(panic, 0)", "pass"),
        ),
    ),
    Table(
        "named",
        "src/esper/simic/normalise.py",
        ("tests/simic/test_normalise.py",),
        (
            (
                "upcast: moments in float32",
                "rows = rows.detach().double()",
                "rows = rows.detach().float()",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/tamiyo/policy/action_masks.py",
        ("tests/tamiyo/policy/test_action_masks.py",),
        (
            (
                "upcast: log-probabilities in half precision",
                "exact = logits if logits.dtype == torch.float64 else logits.float()",
                "exact = logits",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/simic/rollout.py",
        ("tests/simic/test_sequences.py",),
        (
            (
                "hidden state at episode start",
                "torch.where(continues, h[:, environment], 0.0)",
                "h[:, environment]",
            ),
            (
                "T and N",
                "return x[time, environment]",
                "return x[environment % x.shape[0], time % x.shape[1]]",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/tolaria/optim.py",
        ("tests/tolaria/test_optim.py",),
        (
            (
                "AdamW bias correction: first",
                "correction1 = 1.0 - BETA1**state.step",
                "correction1 = torch.ones_like(state.step)",
            ),
            (
                "AdamW bias correction: second",
                "correction2 = (1.0 - BETA2**state.step).sqrt()",
                "correction2 = torch.ones_like(state.step)",
            ),
            (
                "AdamW decay is coupled",
                "        parameters.mul_(1.0 - rate * weight_decay)\n",
                "        gradient = gradient + weight_decay * parameters\n",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/tolaria/plan.py",
        ("tests/tolaria/test_training_oracle.py", "tests/tolaria/test_independence.py"),
        (
            (
                "fossil's learning rate: fossils are frozen",
                "return cls(state.computing, state.blueprint, state.style, "
                "state.alpha, state.frozen, copy)",
                "return cls(state.computing, state.blueprint, state.style, state.alpha, "
                "state.frozen | (state.stage == 7), copy)",
            ),
            (
                "isolation: every seed is isolated",
                "isolation = (copy.alpha == 0).long()",
                "isolation = (copy.alpha >= 0).long()",
            ),
            (
                "isolation: no seed is isolated",
                "isolation = (copy.alpha == 0).long()",
                "isolation = (copy.alpha < 0).long()",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/tolaria/backends/torch.py",
        ("tests/tolaria/test_measure_oracle.py",),
        (
            (
                "ablation's BatchNorm",
                "logits = self._forward(reading, resumption, start=start)",
                "logits = self._forward(reading, resumption, training=True, start=start)",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/simic/growth/shard.py",
        ("tests/simic/growth/test_environment.py",),
        (
            (
                "price stage",
                "pays = state.stage == Stage.FOSSILISED if last else state.acting",
                "pays = state.acting",
            ),
            (
                "twin's data order",
                "torch.cat([groups, twin_groups])",
                "torch.cat([groups, twin_groups + 1])",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/tolaria/coalitions.py",
        ("tests/tolaria/test_coalitions.py",),
        (
            (
                "Shapley weight",
                "factorial(n) * factorial(slots - n - 1) / factorial(slots)",
                "1.0 / slots / 2 ** (slots - 1)",
            ),
            (
                "interactions without the empty coalition",
                "value(i, j) - value(i) - value(j) + value()",
                "value(i, j) - value(i) - value(j)",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/simic/growth/layout.py",
        ("tests/simic/growth/test_many_tasks.py",),
        (
            (
                "task draw: the same in every episode",
                "torch.tensor([episode], device=self.device)",
                "torch.tensor([0], device=self.device)",
            ),
            (
                "task draw: groups share a task",
                "[self.groups % len(self.tasks)]",
                "[self.groups * 0]",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/tolaria/bank.py",
        ("tests/tolaria/test_bank.py",),
        (
            (
                "drift step: the latest",
                "(earliest + (latest - earliest) * draws[:, 1]) * length",
                "latest * length",
            ),
            ("drift step: always", "torch.where(draws[:, 0] < never, length, step)", "step"),
        ),
    ),
    Table(
        "named",
        "src/esper/tolaria/export.py",
        ("tests/tolaria/test_export.py",),
        (
            (
                "export's buffers",
                "((host.layout, stack.host), (host.buffers, stack.buffers))",
                "((host.layout, stack.host), (host.buffers, torch.ones_like(stack.buffers)))",
            ),
        ),
    ),
    Table(
        "named",
        "src/esper/own_models/grafted_model.py",
        ("tests/own_models",),
        (
            (
                "own-model's slot order",
                "for s, slot in enumerate(self.slots):",
                "for s, slot in reversed(list(enumerate(reversed(self.slots)))):",
            ),
        ),
    ),
)
