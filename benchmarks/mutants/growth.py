"""Faults of the lifecycle, its gates and the rewards."""

from mutants import Table

GROWTH = (
    Table(
        "lifecycle",
        "src/esper/kasmina/lifecycle.py",
        ("tests/kasmina/test_lifecycle.py", "tests/kasmina/test_lifecycle_machine.py"),
        (
            ("ages are not scaled", "round(steps * episode_length / 150)", "round(steps)"),
            ("an age of 0", "return max(1, round(", "return max(0, round("),
            (
                "an action out of range is clamped",
                "success = in_range & legal[rows, op, slot]",
                "success = legal[rows, op, slot]",
            ),
            (
                "illegal actions act",
                "success = in_range & legal[rows, op, slot]",
                "success = in_range",
            ),
            (
                "any blueprint germinates",
                'success &= (op != Op.GERMINATE) | kinds[slot, choice["blueprint"]]',
                "success = success.clone()",
            ),
            (
                "every prune is a fade",
                "fading = prunes & (steps > 0) & (state.alpha > 0)",
                "fading = prunes & (state.alpha > 0)",
            ),
            (
                "fading without alpha",
                "fading = prunes & (steps > 0) & (state.alpha > 0)",
                "fading = prunes & (steps > 0)",
            ),
            (
                "HOLDING keeps a seed that fades",
                "lowers = holding & (fading | (retargets",
                "lowers = holding & ((retargets",
            ),
            (
                "HOLDING keeps a seed that is lowered",
                "(fading | (retargets & (target < 1.0 - ALPHA_TOLERANCE)))",
                "fading",
            ),
            (
                "alpha curve: the first blend takes the action's",
                'torch.where(blends, FIRST_CURVE[state.style], choice["alpha_curve"])',
                'choice["alpha_curve"]',
            ),
            (
                "the first blend ignores its goal",
                "torch.where(blends, state.goal, target)",
                "torch.where(blends, target, target)",
            ),
            (
                "the first blend ignores its tempo",
                "torch.where(blends, state.tempo, steps)",
                "steps",
            ),
            (
                "a fade goes to the target",
                ".masked_fill(fading, 0.0)",
                "",
            ),
            ("a fade is not remembered", "pruning=state.pruning | fading", "pruning=state.pruning"),
            (
                "a fading seed stops at once",
                "pruning | fading), prunes & ~fading)",
                "pruning | fading), prunes)",
            ),
            (
                "roll-back prunes fossils",
                "where = where[:, None] & _CAN_BE_PRUNED[state.stage]",
                "where = where[:, None] & (state.stage > 0)",
            ),
            (
                "finished ramps run on",
                "ramping = state.ramp_mode != AlphaMode.HOLD",
                "ramping = state.ramp_steps > 0",
            ),
            (
                "ramps end a step late",
                "(ramp_done >= state.ramp_steps)",
                "(ramp_done > state.ramp_steps)",
            ),
            (
                "a finished ramp misses its target",
                "torch.where(ends, state.ramp_target, between)",
                "between",
            ),
            (
                "the embargo lasts a step longer",
                "(stage_age >= rules.embargo)",
                "(stage_age > rules.embargo)",
            ),
            ("dead seeds age", "age=state.age + state.living,", "age=state.age + 1,"),
            (
                "empty slots age",
                "state.stage_age + (state.stage != Stage.DORMANT)",
                "state.stage_age + 1",
            ),
            ("no velocity", "alpha_velocity=alpha - state.alpha,", "alpha_velocity=state.alpha,"),
            (
                "a reset slot keeps its seed",
                ".with_empty_slots(resetting)",
                ".with_empty_slots(resetting & ~resetting)",
            ),
            ("cosine is linear", "0.5 * (1.0 - torch.cos(torch.pi * time))", "1.0 * time"),
            (
                "the sigmoid is off centre",
                "(steepness * (time - 0.5))",
                "(steepness * (time - 0.4))",
            ),
            ("the sigmoid does not end at 1", "- low) / span", "- low)"),
            (
                "a stage keeps its age",
                "state.stage_age.masked_fill(stage != state.stage, 0)",
                "state.stage_age",
            ),
            (
                "a stopped seed keeps alpha",
                "alpha=state.alpha.masked_fill(where, 0.0),\n        ramp_mode",
                "alpha=state.alpha,\n        ramp_mode",
            ),
            ("a ramp of 0 steps does not jump", "jump = (steps == 0) | (", "jump = ("),
            (
                "down is up",
                "torch.where(target > state.alpha, AlphaMode.UP, AlphaMode.DOWN)",
                "torch.where(target < state.alpha, AlphaMode.UP, AlphaMode.DOWN)",
            ),
            ("a ramp goes on counting", "state.ramp_done.masked_fill(where, 0)", "state.ramp_done"),
        ),
    ),
    Table(
        "gates",
        "src/esper/kasmina/gates.py",
        ("tests/kasmina/test_gates.py", "tests/kasmina/test_lifecycle.py"),
        (
            (
                "sick seeds are healthy",
                "(signals.health >= HEALTHY) & ~signals.exploding",
                "~signals.exploding",
            ),
            (
                "exploding seeds are healthy",
                "(signals.health >= HEALTHY) & ~signals.exploding",
                "signals.health >= HEALTHY",
            ),
            (
                "health at the bound is sick",
                "signals.health >= HEALTHY",
                "signals.health > HEALTHY",
            ),
            (
                "one seed too many",
                "keepdim=True) < rules.max_seeds",
                "keepdim=True) <= rules.max_seeds",
            ),
            (
                "no limit of seeds",
                "germinates = dormant & (living.sum(1, keepdim=True) < rules.max_seeds)",
                "germinates = dormant.clone()",
            ),
            ("several at a time", "if rules.one_at_a_time:", "if False:"),
            ("always one at a time", "if rules.one_at_a_time:", "if True:"),
            (
                "training takes no time",
                "training & (state.stage_age >= rules.training_age) & healthy",
                "training & healthy",
            ),
            (
                "training takes a step longer",
                "(state.stage_age >= rules.training_age)",
                "(state.stage_age > rules.training_age)",
            ),
            (
                "sick seeds blend",
                "(state.stage_age >= rules.training_age) & healthy",
                "(state.stage_age >= rules.training_age)",
            ),
            (
                "half-blended seeds hold",
                "holds = blending & is_full & target_is_full",
                "holds = blending & target_is_full",
            ),
            (
                "seeds that are lowered hold",
                "holds = blending & is_full & target_is_full",
                "holds = blending & is_full",
            ),
            (
                "seeds on a ramp hold",
                " & target_is_full & (state.ramp_mode == AlphaMode.HOLD)",
                " & target_is_full",
            ),
            (
                "seeds that were not measured are kept",
                "holding & signals.contribution.isfinite() & healthy",
                "holding & healthy",
            ),
            (
                "sick seeds are kept",
                "signals.contribution.isfinite() & healthy",
                "signals.contribution.isfinite()",
            ),
            ("strict gates are not", "    if rules.strict:\n", "    if False:\n"),
            ("strict gates always", "    if rules.strict:\n", "    if True:\n"),
            (
                "no improvement needed",
                "        blends &= signals.improvement >= MIN_IMPROVEMENT\n",
                "",
            ),
            (
                "no gradient ratio needed",
                "        blends &= signals.gradient_ratio >= MIN_GRADIENT_RATIO\n",
                "",
            ),
            (
                "no blending age needed",
                "        holds &= state.stage_age >= rules.blending_age\n",
                "",
            ),
            (
                "no contribution needed",
                "        keeps &= signals.contribution >= MIN_CONTRIBUTION\n",
                "",
            ),
            (
                "retargeted on a ramp",
                "Op.SET_ALPHA_TARGET: blends & at_rest",
                "Op.SET_ALPHA_TARGET: blends",
            ),
            ("pruned too young", "prunable & old_enough & at_rest", "prunable & at_rest"),
            ("pruned on a ramp", "prunable & old_enough & at_rest", "prunable & old_enough"),
            ("pruned a step late", "state.age >= rules.prune_age", "state.age > rules.prune_age"),
            (
                "G1 does not advance",
                "gates[Gate.G1] | gates[Gate.G2] | gates[Gate.G3]",
                "gates[Gate.G2] | gates[Gate.G3]",
            ),
            (
                "G3 does not advance",
                "gates[Gate.G1] | gates[Gate.G2] | gates[Gate.G3]",
                "gates[Gate.G1] | gates[Gate.G2]",
            ),
        ),
    ),
    Table(
        "rewards",
        "src/esper/tamiyo/policy/features.py",
        ("tests/simic/growth/test_rewards.py",),
        (
            (
                "price is paid to the host",
                "return score - price * growth(",
                "return score + price * growth(",
            ),
            (
                "no price",
                "return score - price * growth(score, added_parameters, host_parameters)",
                "return score",
            ),
            (
                "price is linear",
                "score.dtype) / host_parameters).log1p()",
                "score.dtype) / host_parameters)",
            ),
        ),
    ),
    Table(
        "rewards",
        "src/esper/simic/growth/rewards.py",
        ("tests/simic/growth/test_rewards.py",),
        (
            (
                "a reward before the end",
                "if inputs.last else torch.zeros_like(inputs.score)",
                "if True else inputs.score",
            ),
            (
                "reward sign",
                "REWARD_SCALE * ((_utility(inputs) - inputs.twin_score)",
                "-REWARD_SCALE * ((_utility(inputs) - inputs.twin_score)",
            ),
            (
                "the twin is not subtracted",
                "((_utility(inputs) - inputs.twin_score) - inputs.previous_gain)",
                "(_utility(inputs) - inputs.previous_gain)",
            ),
            ("gains add up", "- inputs.previous_gain)", "+ inputs.previous_gain)"),
            (
                "not divided by the length",
                "REWARD_SCALE / inputs.episode_length * _utility",
                "REWARD_SCALE * _utility",
            ),
            ("a scale of one", "REWARD_SCALE = 10.0", "REWARD_SCALE = 1.0"),
        ),
    ),
    Table(
        "rewards",
        "src/esper/simic/growth/rewards.py",
        ("tests/simic/growth/test_rewards.py",),
        (
            (
                "credit on the last step",
                "    if inputs.last:\n        return torch.zeros_like(inputs.score)\n",
                "",
            ),
            (
                "HOLDING earns nothing",
                "(stage == Stage.BLENDING) | (stage == Stage.HOLDING)",
                "stage == Stage.BLENDING",
            ),
            (
                "harm is not charged",
                "torch.where((c < 0) | (c < progress), c,",
                "torch.where(c < progress, c,",
            ),
            (
                "growth that hurts is credited",
                "credit > 0, credit * factor, credit)",
                "credit > 0, credit, credit)",
            ),
            (
                "no charge for dependence",
                "torch.where(pending, credit - charge, 0.0)",
                "torch.where(pending, credit, 0.0)",
            ),
            ("the charge has no cap", ".clamp(0.0, RATIO_CAP)", ".clamp(min=0.0)"),
            ("shock is linear", "change.square() * size", "change.abs() * size"),
            ("shock has no cap", ".clamp(max=SHOCK_CAP)", ""),
            (
                "a bonus for growth that hurts",
                "bonus = torch.where(imp < 0, 0.0, (",
                "bonus = torch.where(imp < -1e9, 0.0, (",
            ),
            (
                "no time held",
                "(FOSSIL_BASE + 0.1 * c) * time_held(inputs)",
                "FOSSIL_BASE + 0.1 * c",
            ),
            ("price has no cap", "(PRICE_RATE * grown).clamp(max=PRICE_CAP)", "PRICE_RATE * grown"),
            (
                "the first seed pays occupancy",
                "(inputs.after.living.sum(1) - 1)",
                "inputs.after.living.sum(1)",
            ),
            ("blending is free", "cost = BLEND_COST * blends", "cost = 0.0 * blends"),
            (
                "no reward at the end",
                "return reward + ACCURACY_RATE * inputs.accuracy if inputs.last else reward",
                "return reward",
            ),
        ),
    ),
    Table(
        "rewards",
        "src/esper/simic/growth/rewards.py",
        ("tests/simic/growth/test_rewards.py",),
        (
            ("a potential after the end", 'if which == "after" and inputs.last:', "if False:"),
            ("no cap of ages", ".clamp(max=AGE_CAP)", ""),
            (
                "ages are not scaled",
                "AGE_RATE * REFERENCE_LENGTH / inputs.episode_length",
                "AGE_RATE",
            ),
            ("dead seeds have an age", "torch.where(state.living, by_age, 0.0)", "by_age"),
            (
                "the wrong way",
                '"after") - stage_potential(inputs, "before")',
                '"before") - stage_potential(inputs, "after")',
            ),
        ),
    ),
)
