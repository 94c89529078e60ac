"""Faults of the C++ sources."""

from mutants import Table

_SOURCE = "src/esper/native/src/"
_HOSTS = ("tests/tolaria/test_native.py", "tests/tolaria/test_training_oracle.py")

NATIVE = (
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
)
