"""Faults of the engine and of checkpoints."""

from mutants import Table

_ENGINE = (
    "tests/tolaria/test_minibatches.py",
    "tests/tolaria/test_bank.py",
    "tests/tolaria/test_recipe.py",
    "tests/tolaria/test_measure_oracle.py",
    "tests/tolaria/test_independence.py",
    "tests/tolaria/test_training_oracle.py",
    "tests/simic/growth/test_host_families.py",
)

RUNNING = (
    Table(
        "engine",
        "src/esper/tolaria/engine.py",
        _ENGINE,
        (
            ("ablation keeps its seed", "            alpha[:, s] = 0.0\n", ""),
            (
                "contribution has the wrong sign",
                "scores.expected[variant.rows] - without.expected",
                "without.expected - scores.expected[variant.rows]",
            ),
            (
                "seeds that do not act contribute 0",
                'torch.where(state.acting, 0.0, float("nan"))',
                "torch.where(state.acting, 0.0, 0.0)",
            ),
            (
                "price stage: commitment keeps seeds that hold",
                "(host.alpha > 0) & (host.stage != Stage.FOSSILISED)",
                "(host.alpha > 0) & (host.stage < Stage.HOLDING)",
            ),
            (
                "committed hosts keep all seeds",
                "torch.where(state.stage == Stage.FOSSILISED, state.alpha, 0.0)",
                "state.alpha",
            ),
            (
                "committed scores overwrite the others",
                "committed_scores = scores.map(torch.clone)",
                "committed_scores = scores",
            ),
            (
                "drift step: one late",
                "torch.where(step >= self.switch_step, self._after, self._before)",
                "torch.where(step > self.switch_step, self._after, self._before)",
            ),
            (
                "drift backwards",
                "torch.where(step >= self.switch_step, self._after, self._before)",
                "torch.where(step >= self.switch_step, self._before, self._after)",
            ),
            (
                "the same minibatches in every episode",
                "Purpose.MINIBATCH, episode, count)",
                "Purpose.MINIBATCH, 0, count)",
            ),
            (
                "the same minibatches in every step",
                "bits = self.draws.at(step).unflatten(1, (-1, count))",
                "bits = self.draws.at(0).unflatten(1, (-1, count))",
            ),
            (
                "one RNG for two purposes",
                "StepBits(self.data_seed, groups, Purpose.MINIBATCH,",
                "StepBits(self.data_seed, groups, Purpose.HOST_INIT,",
            ),
            (
                "twin's data order",
                "StepBits(self.data_seed, groups, Purpose",
                "StepBits(self.data_seed, groups + torch.arange(len(groups)), Purpose",
            ),
            ("optimizers survive an episode", "        self.stack.clear_optimizers()\n", ""),
            ("seeds survive an episode", "            store.zero_()\n", "            pass\n"),
            ("hosts survive an episode", "        self.stack.host.copy_(parameters[index])\n", ""),
            (
                "buffers survive an episode",
                "        self.stack.buffers.copy_(buffers[index])\n",
                "",
            ),
            (
                "a newborn has a dead seed's moments",
                "            self.stack.seed_optimizers[s].clear_rows(rows)\n",
                "",
            ),
            ("all slots are born alike", "Purpose.SEED_INIT + s,", "Purpose.SEED_INIT,"),
            (
                "all births are alike",
                "                Purpose.SEED_INIT + s,\n                step,",
                "                Purpose.SEED_INIT + s,\n                0,",
            ),
            (
                "all hosts are alike in all episodes",
                "uniform(self.seed, streams, purpose, self.episode, step, width",
                "uniform(self.seed, streams, purpose, 0, step, width",
            ),
            (
                "hosts have one seed",
                "uniform(self.seed, streams, purpose, self.episode",
                "uniform(0, streams, purpose, self.episode",
            ),
            ("initial weights are positive", "(2.0 * draws - 1.0)", "draws"),
            (
                "channels shift without their moments",
                "move.of_parameters(self.stack.host, optimizer.first, optimizer.second)",
                "move.of_parameters(self.stack.host)",
            ),
            (
                "channels shift without their buffers",
                "            move.of_buffers(self.stack.buffers)\n",
                "",
            ),
            (
                "hosts of one rate",
                "host_learning_rate=(bank.host_rates * factor)[task]",
                "host_learning_rate=(bank.host_rates * factor)[task * 0]",
            ),
            ("no weight decay", "weight_decay=bank.tasks[0].weight_decay", "weight_decay=0.0"),
            (
                "no clipping of hosts",
                "max_gradient_norm=bank.tasks[0].max_gradient_norm",
                "max_gradient_norm=1e9",
            ),
            ("dead seeds have parameters", "torch.where(state.living, counts, 0)", "counts"),
            (
                "rows are measured with the first data",
                "dataset if rows is None else dataset[rows]",
                "dataset",
            ),
        ),
    ),
    Table(
        "checkpoint",
        "src/esper/simic/run/checkpoint.py",
        ("tests/simic/run/test_checkpoint.py",),
        (
            (
                "directory sync: of checkpoints",
                "    sync(folder)\n    _prune(run",
                "    _prune(run",
            ),
            (
                "directory sync: of a checkpoint",
                "    sync(folder)\n    try:\n        _contents",
                "    try:\n        _contents",
            ),
            (
                "directory sync: of the run",
                "        folder.mkdir()\n        sync(run)\n",
                "        folder.mkdir()\n",
            ),
            ("drafts are left", "        _remove([draft])\n", "        pass\n"),
            ("older drafts are left", '    _remove(folder.glob(".draft-*"))\n', ""),
            ("not read back", "        _contents(folder)\n", "        pass\n"),
            (
                "one checkpoint fewer is kept",
                "if path not in done[-keep:])",
                "if path not in done[-keep:][1:])",
            ),
            ("checkpoints are not removed", "if path not in done[-keep:])", "if False)"),
            (
                "checkpoints of later rounds count",
                "done = [path for path in folders if int(path.name) <= newest]",
                "done = folders",
            ),
            ("the round is not compared", "if manifest.round != int(path.name):", "if False:"),
            ("checksums are not compared", "if _sha256(files[name]) != checksum:", "if False:"),
            (
                "a manifest may name any file",
                'if not (name.endswith(".pt") and name.removesuffix(".pt").isidentifier()):',
                "if False:",
            ),
            (
                "the seal is not compared",
                "intact = _manifest_text(fields) == content",
                "intact = True",
            ),
            ("any schema is read", 'if fields.get("schema") != SCHEMA_VERSION:', "if False:"),
            ("pickles are executed", "weights_only=True", "weights_only=False"),
            ("archives are not checked", "        _check_archive(content)\n", ""),
            ("anything but a dictionary", "if not isinstance(part, dict):", "if False:"),
            (
                "compressed parts are read",
                "if any(entry.compress_type != ZIP_STORED for entry in entries):",
                "if False:",
            ),
            (
                "overlapping parts are read",
                "if sum(entry.file_size for entry in entries) > len(content):",
                "if False:",
            ),
            (
                "any function may be named",
                "if is_name and str(argument)",
                "if False and str(argument)",
            ),
            (
                "any size is read",
                "read_regular(path / name, manifest.bytes.get(name, 0))",
                "read_regular(path / name, 1 << 40)",
            ),
            ("blueprints are not compared", "    if names == BLUEPRINTS:\n", "    if True:\n"),
            (
                "the oldest checkpoint is loaded",
                "for path in reversed(_checkpoints(run)):\n        try:",
                "for path in _checkpoints(run):\n        try:",
            ),
            (
                "checkpoints in the order of names",
                "key=lambda p: int(p.name))",
                "key=lambda p: p.name)",
            ),
            (
                "damage is not said",
                "            for what in damage:\n",
                "            for what in ():\n",
            ),
        ),
    ),
)
