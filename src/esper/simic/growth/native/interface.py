"""The structures of ``src/calls.h``, and the library's functions."""

import ctypes
from ctypes import POINTER, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

from esper.tolaria.backends.native.build import library
from esper.tolaria.backends.native.interface import checked

SOURCE = Path(__file__).parent / "src"
EXACT = "-ffp-contract=off"
"""Sums of products are rounded as torch rounds them."""

NUMBERS = (
    *("stage", "blueprint", "style", "tempo", "ramp_mode"),
    *("ramp_curve", "ramp_steps", "ramp_done", "age", "stage_age"),
)
"""Fields of ``SeedState`` in the order of their int64 block."""
AMOUNTS = ("goal", "alpha", "alpha_velocity", "ramp_start", "ramp_target")
"""Likewise of the float32 block."""
FLAGS = ("pruning",)
"""Likewise of the bool block."""
SIGNALS = (
    *("contribution", "contribution_velocity", "health", "previous_health", "gradient_norm"),
    *("gradient_ratio", "baseline", "improvement", "birth_accuracy"),
)
"""Fields of ``SeedSignals`` in the order of their float32 block."""
SIGNAL_FLAGS = ("exploding",)
"""Likewise of the bool block."""


class Heads(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        *((name, c_int64) for name in ("op", "slot", "blueprint", "style", "tempo")),
        *((name, c_int64) for name in ("alpha_target", "alpha_speed", "alpha_curve")),
    ]


class Ops(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        *((name, c_int64) for name in ("wait", "germinate", "set_alpha_target", "prune")),
        *((name, c_int64) for name in ("fossilise", "advance")),
    ]


class Stages(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        *((name, c_int64) for name in ("dormant", "germinated", "training", "blending")),
        *((name, c_int64) for name in ("holding", "fossilised", "pruned", "embargoed")),
        ("resetting", c_int64),
    ]


class Modes(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [(name, c_int64) for name in ("hold", "up", "down")]


class Curves(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [(name, c_int64) for name in ("linear", "cosine")]


class Reasons(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [(name, c_int64) for name in ("none", "not_finite", "collapse", "runaway")]


class RuleNumbers(ctypes.Structure):
    """``Rules`` of ``calls.h``."""

    _fields_ = [
        *((name, c_int64) for name in ("training_age", "blending_age", "prune_age", "embargo")),
        *((name, c_int64) for name in ("max_seeds", "strict", "one_at_a_time")),
    ]


class StepSpec(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "environments", "slots")),
        *((name, c_int64) for name in ("heads", "ops", "blueprints", "styles", "stage_count")),
        *((name, c_int64) for name in ("stage_features", "style_features", "op_features")),
        *((name, c_int64) for name in ("host_width", "slot_width", "history")),
        ("head", Heads),
        ("op", Ops),
        ("stage", Stages),
        ("mode", Modes),
        ("curve", Curves),
        ("rules", RuleNumbers),
        *((name, c_float) for name in ("tolerance", "full", "healthy", "least_improvement")),
        *((name, c_float) for name in ("least_gradient_ratio", "least_contribution")),
        *((name, c_float) for name in ("vanishing_norm", "exploding_norm")),
        *((name, c_float) for name in ("vanishing_weight", "exploding_weight")),
        *((name, c_float) for name in ("velocity_kept", "velocity_new")),
        *((name, c_float) for name in ("ratio_kept", "ratio_new", "ratio_floor")),
        *((name, c_float) for name in ("pi", "host_root", "host_parameters", "log_host")),
        *((name, c_float) for name in ("most_seeds", "episode_length", "points")),
        ("infinite_norm", c_float),
        *((name, c_void_p) for name in ("last_option", "moved", "first_curve", "targets")),
        *((name, c_void_p) for name in ("speeds", "tempos", "sigmoids", "living", "computing")),
        *((name, c_void_p) for name in ("developing", "prunable", "blended", "kinds")),
        *((name, c_void_p) for name in ("parameters", "tensor_counts", "tensors")),
        *((name, c_void_p) for name in ("stage_table", "share_table", "ramp_table")),
        *((name, c_void_p) for name in ("style_table", "op_table", "place")),
    ]


class SeedBlocks(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [(name, c_void_p) for name in ("numbers", "amounts", "flags")]


class SignalBlocks(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [(name, c_void_p) for name in ("amounts", "flags")]


class ActCall(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        ("before", SeedBlocks),
        ("actions", c_void_p),
        ("legal", c_void_p),
        ("after", SeedBlocks),
        ("success", c_void_p),
        *((name, c_int64) for name in ("germinated", "fossilised")),
    ]


class CheckCall(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "slots", "history", "least_history")),
        ("strikes_allowed", c_int64),
        *((name, c_float) for name in ("guessing", "collapse_mean", "collapse_band")),
        *((name, c_float) for name in ("collapse_expected", "runaway_loss")),
        *((name, c_float) for name in ("runaway_deviations", "runaway_factor")),
        ("reasons", Reasons),
        *((name, c_void_p) for name in ("losses", "strikes", "healthy")),
        *((name, c_void_p) for name in ("train_loss", "loss", "expected")),
        *((name, c_void_p) for name in ("host_norm", "seed_norm", "computes", "stage", "reason")),
    ]


class PassCall(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        ("before", SeedBlocks),
        ("acted", SeedBlocks),
        ("previous", SignalBlocks),
        *((name, c_void_p) for name in ("rolled", "seed_parameters")),
        *((name, c_void_p) for name in ("accuracy_before", "accuracy")),
        *((name, c_void_p) for name in ("train_loss", "host_norm", "seed_norm", "tensor_norms")),
        ("contribution", c_void_p),
        ("after", SeedBlocks),
        ("signals", SignalBlocks),
        *((name, c_void_p) for name in ("birth_accuracy", "legal", "parameters", "ever")),
    ]


class ObserveCall(ctypes.Structure):
    """See ``calls.h``."""

    _fields_ = [
        ("seeds", SeedBlocks),
        ("signals", SignalBlocks),
        ("seed_parameters", c_void_p),
        *((name, c_float) for name in ("part", "rest")),
        *((name, c_void_p) for name in ("losses", "expected", "train_loss", "train_accuracy")),
        *((name, c_void_p) for name in ("last_op", "success", "rolled_back")),
        *((name, c_void_p) for name in ("score", "twin_score")),
        *((name, c_void_p) for name in ("host", "slot", "critic", "blueprints")),
    ]


class Library:
    """The functions.

    Raises:
        Unavailable: the library cannot be built.
    """

    def __init__(self) -> None:
        found, spec = library(SOURCE, EXACT), POINTER(StepSpec)

        def function(name: str, *arguments: type) -> "ctypes._FuncPointer":
            pointer = getattr(found, f"esper_step_{name}")
            pointer.restype, pointer.argtypes = ctypes.c_int, arguments
            return checked(pointer)

        self.act = function("act", spec, POINTER(ActCall))
        self.check = function("check", POINTER(CheckCall))
        self.pass_time = function("pass", spec, POINTER(PassCall))
        self.observe = function("observe", spec, POINTER(ObserveCall))


@cache
def step_library() -> Library:
    """The library's functions, see ``Library``."""
    return Library()
