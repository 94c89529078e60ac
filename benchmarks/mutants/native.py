"""Faults of the C++ sources."""

from mutants import Table

_SOURCE = "src/esper/native/src/"
_STEP = ("tests/simic/growth/test_native_step.py",)
_HOSTS = ("tests/tolaria/test_native.py", "tests/tolaria/test_training_oracle.py")
_POLICY = ("tests/tamiyo/policy/test_native_policy.py",)

NATIVE = (
    Table(
        "native",
        _SOURCE + "step/lifecycle.h",
        _STEP,
        (
            ("a stage keeps its age", "  if (seed.stage != stage) seed.stage_age = 0;\n", ""),
            (
                "a stopped seed keeps alpha",
                "inline void stop(const StepSpec& spec, Seed& seed) {\n  seed.alpha = 0;\n",
                "inline void stop(const StepSpec& spec, Seed& seed) {\n",
            ),
            (
                "a ramp of 0 steps does not jump",
                "const bool jump = steps == 0 || std::abs",
                "const bool jump = std::abs",
            ),
            ("down is up", "target > alpha ? spec.mode.up", "target < alpha ? spec.mode.up"),
            (
                "every prune is a fade",
                "prunes && steps > 0 && seed.alpha > 0",
                "prunes && seed.alpha > 0",
            ),
            (
                "the first blend ignores its tempo",
                "begin_ramp(spec, seed, seed.goal, seed.tempo,",
                "begin_ramp(spec, seed, seed.goal, steps,",
            ),
            (
                "finished ramps run on",
                "const bool ramping = seed.ramp_mode != spec.mode.hold;",
                "const bool ramping = seed.ramp_steps > 0;",
            ),
            ("a fade is not remembered", "  if (slowly) seed.pruning = true;\n", ""),
            (
                "ranges are not checked",
                "if (choice[h] < 0 || choice[h] > spec.last_option[h]) return false;",
                "if (choice[h] < 0) return false;",
            ),
            (
                "illegal actions act",
                "  if (!call.legal[(n * spec.ops + op) * spec.slots + slot]) return false;\n",
                "",
            ),
            ("roll-back prunes fossils", "  if (!spec.prunable[seed.stage]) return;\n", ""),
            (
                "cosine is linear",
                "return 0.5f * (1.0f - std::cos(spec.pi * time));",
                "return time;",
            ),
            (
                "ramps end a step late",
                "seed.ramp_done >= seed.ramp_steps;",
                "seed.ramp_done > seed.ramp_steps;",
            ),
            ("dead seeds age", "seed.age += spec.living[stage] != 0;", "seed.age += 1;"),
            (
                "the embargo lasts a step longer",
                "seed.stage_age >= spec.rules.embargo",
                "seed.stage_age > spec.rules.embargo",
            ),
        ),
    ),
    Table(
        "native",
        _SOURCE + "step/gates.h",
        _STEP,
        (
            (
                "one seed too many",
                "living < spec.rules.max_seeds",
                "living <= spec.rules.max_seeds",
            ),
            ("several at a time", "!(spec.rules.one_at_a_time && developing)", "true"),
            (
                "training takes a step longer",
                "seed.stage_age >= rules.training_age",
                "seed.stage_age > rules.training_age",
            ),
            ("half-blended seeds hold", "std::abs(seed.alpha - 1.0f) <= spec.tolerance && ", ""),
            (
                "unmeasured seeds are kept",
                "std::isfinite(signals.contribution) && healthy",
                "healthy",
            ),
            ("pruned too young", "seed.age >= spec.rules.prune_age && at_rest", "at_rest"),
            (
                "sick seeds are healthy",
                "signals.health >= spec.healthy && !signals.exploding",
                "!signals.exploding",
            ),
        ),
    ),
    Table(
        "native",
        _SOURCE + "step/governor.h",
        (*_STEP, "tests/tolaria/test_governor.py"),
        (
            ("governor's window: sick losses", "  if (!call.healthy[n]) return;\n", ""),
            (
                "strikes are not reset",
                "call.strikes[n] = panic ? 0 : strikes;",
                "call.strikes[n] = strikes;",
            ),
            ("no deviation", "std::sqrt(squares / float(count))", "squares / float(count)"),
            (
                "collapse is not seen",
                ": collapsed                        ?",
                ": false                            ?",
            ),
        ),
    ),
    Table(
        "native",
        _SOURCE + "step/signals.h",
        _STEP,
        (
            (
                "exploding is vanishing",
                "spec.vanishing_weight * vanished - spec.exploding_weight * exploded",
                "spec.vanishing_weight * exploded - spec.exploding_weight * vanished",
            ),
            ("velocity is not kept", "spec.velocity_kept * previous.contribution_velocity + ", ""),
            (
                "ratio is not smoothed",
                "spec.ratio_kept * previous + spec.ratio_new * ratio",
                "ratio",
            ),
            (
                "no improvement",
                "now.improvement = call.accuracy[n] - previous.baseline;",
                "now.improvement = call.accuracy[n];",
            ),
        ),
    ),
    Table(
        "native",
        _SOURCE + "step/observe.h",
        _STEP,
        (
            ("shares are sums", "out.put(share / float(slots));", "out.put(share);"),
            (
                "no symlog",
                "return (x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f) * std::log1p(std::abs(x));",
                "return x;",
            ),
            (
                "the critic sees no gain",
                "critic.put(spec.points * (call.score[n] - call.twin_score[n]));",
                "critic.put(spec.points * call.score[n]);",
            ),
            ("dead seeds are seen", "  if (!living) std::fill(begin, out.at, 0.0f);\n", ""),
        ),
    ),
    Table(
        "native",
        _SOURCE + "hosts/optimizer.h",
        _HOSTS,
        (
            (
                "AdamW bias correction",
                "const T size = update.learning_rate / correction1;",
                "const T size = update.learning_rate;",
            ),
            (
                "AdamW decay is left out",
                "parameters[i] = parameters[i] * kept -",
                "parameters[i] = parameters[i] -",
            ),
            ("gradients are not clipped", "return scale > T(1) ? T(1) : scale;", "return T(1);"),
            ("momentum of SGD", "first[i] = update.momentum * first[i] + g;", "first[i] = g;"),
        ),
    ),
    Table(
        "native",
        _SOURCE + "hosts/loss.h",
        (*_HOSTS, "tests/tolaria/test_measure_oracle.py"),
        (
            (
                "expected accuracy is hits",
                "score.expected += logits.data[labels[lane + i] * lanes + lane + i];",
                "score.expected += T(1);",
            ),
            (
                "the gradient is not a mean",
                "const T share = T(1) / T(softmax.images);",
                "const T share = T(1);",
            ),
        ),
    ),
    Table(
        "native",
        _SOURCE + "hosts/slot.h",
        _HOSTS,
        (
            (
                "isolation: the seed acts",
                "return isolated() ? x : attached(arena);",
                "return attached(arena);",
            ),
            (
                "isolation: the gradient flows",
                "const bool flows = !isolated();",
                "const bool flows = true;",
            ),
            (
                "isolated seeds do not learn",
                "const T factor = isolated() ? T(1) : seed_.alpha;",
                "const T factor = seed_.alpha;",
            ),
            (
                "the gate is open",
                "load(x_.data + i) + load(gates_.data + lane) * load(f_.data + i) * alpha",
                "load(x_.data + i) + load(f_.data + i) * alpha",
            ),
        ),
    ),
    Table(
        "native",
        _SOURCE + "hosts/normalisation.h",
        _HOSTS,
        (
            (
                "BatchNorm's running variance is biased",
                "variance * (count / (count - T(1)))",
                "variance",
            ),
            (
                "BatchNorm's gradient without its mean",
                "load(gradient + i) - offset - (load",
                "load(gradient + i) - (load",
            ),
            ("groups of channels", "channels / count >= 16", "channels / count >= 4"),
        ),
    ),
    Table(
        "native",
        _SOURCE + "hosts/pooling.h",
        _HOSTS,
        (
            (
                "all maxima learn",
                "gradient = here ? Vector<T>{} : gradient;",
                "gradient = gradient;",
            ),
        ),
    ),
    Table(
        "native",
        _SOURCE + "policy/categorical.h",
        _POLICY,
        (
            ("entropy's gradient", "- d_entropy * p * (at(i) + whole)", "- d_entropy * p * at(i)"),
            (
                "illegal options have a probability",
                "if (legal[i]) total += std::exp(at(i) - most);",
                "total += std::exp(at(i) - most);",
            ),
            (
                "the least probable is drawn",
                "if (value > most) {",
                "if (value < most || most == -std::numeric_limits<T>::infinity()) {",
            ),
        ),
    ),
    Table(
        "native",
        _SOURCE + "policy/sequence.h",
        _POLICY,
        (
            (
                "the forget gate",
                "forget * load(before + c) + in * candidate",
                "load(before + c) + in * candidate",
            ),
            (
                "no gradient through time",
                "store(cells + c, dc * forget);",
                "store(cells + c, dc * T(0));",
            ),
            (
                "LayerNorm's gradient without its mean",
                "(scaled(c) - mean - load(n + c) * along)",
                "(scaled(c) - load(n + c) * along)",
            ),
        ),
    ),
)
