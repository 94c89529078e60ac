"""Compilation around the LSTM: two graphs without breaks, and eager if compilation fails."""

import logging
import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.exc import CppCompileError, InductorError

from esper.leyline.config import LearnerConfig
from esper.simic.growth.agent import growth_agent
from esper.simic.loss import is_compiler_error, resolve_mode
from esper.simic.ppo import PPOAgent
from synthetic import CPU, synthetic_rollout

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


NO_COMPILER = InductorError(RuntimeError("no such compiler\nand a long trace"), None)
"""What the compiler raises where there is no C++ compiler, in the forward or backward pass."""


def agent_with(mode: str) -> PPOAgent:
    torch._dynamo.reset()
    counters.clear()
    config = LearnerConfig(lstm_hidden=8, ppo_epochs=2, minibatches=2)
    return growth_agent(config, 0, CPU, None, mode)


def learned(agent: PPOAgent) -> dict[str, float | None]:
    return agent.update(synthetic_rollout(agent, 4, 8, 2, seed=1))


def test_auto_compiles_on_cuda_alone() -> None:
    assert resolve_mode("auto", CPU) == "off"
    assert resolve_mode("auto", torch.device("cuda")) == "default"
    assert resolve_mode("max-autotune", CPU) == "max-autotune"


def test_off_compiles_nothing() -> None:
    learned(agent_with("off"))
    assert not counters["stats"]


@pytest.fixture
def traced(monkeypatch):
    """``torch.compile`` that traces graphs but skips code generation, which takes a minute."""
    compile_function = torch.compile

    def trace(function, mode):
        return compile_function(function, backend="aot_eager", fullgraph=False)

    monkeypatch.setattr(torch, "compile", trace)


def test_two_graphs_are_traced_and_none_breaks(traced) -> None:
    eager, agent = learned(agent_with("off")), agent_with("default")
    metrics = learned(agent)
    assert agent.compiled.active
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
        assert metrics[name] == pytest.approx(eager[name], rel=1e-4, abs=1e-6), name


def test_further_updates_do_not_recompile(traced) -> None:
    agent = agent_with("default")
    for episode in range(3):
        agent.update(synthetic_rollout(agent, 4, 8, 2, seed=episode, episode=episode))
    assert counters["stats"]["unique_graphs"] == 2


def failing_at(monkeypatch, when: str, error: Exception = NO_COMPILER) -> None:
    def fail() -> None:
        raise error

    def compile_function(function, mode):
        def broken(*arguments):
            if when == "first call":
                fail()
            result = function(*arguments)
            if isinstance(result[0], torch.Tensor) and result[0].ndim == 0:
                result[0].register_hook(lambda gradient: fail())
            return result

        return broken

    monkeypatch.setattr(torch, "compile", compile_function)


@pytest.mark.parametrize("when", ["first call", "backward"])
def test_a_failed_compilation_warns_once_and_runs_eagerly(when, monkeypatch, caplog) -> None:
    eager = learned(agent_with("off"))
    failing_at(monkeypatch, when)
    agent = agent_with("default")
    with caplog.at_level(logging.WARNING, "esper"):
        metrics = learned(agent)
        agent.update(synthetic_rollout(agent, 4, 8, 2, seed=2, episode=1))
    assert [r.getMessage().startswith("compile: ") for r in caplog.records] == [True]
    assert "\n" not in caplog.records[0].getMessage()
    assert metrics["grad_norm"] == eager["grad_norm"]


def test_too_little_memory_is_not_taken_for_a_failed_compilation(monkeypatch) -> None:
    def compile_function(function, mode):
        def full(*arguments):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        return full

    monkeypatch.setattr(torch, "compile", compile_function)
    agent = agent_with("default")
    with pytest.raises(torch.OutOfMemoryError):
        learned(agent)
    assert agent.compiled.active


@pytest.mark.parametrize("when", ["first call", "backward"])
def test_another_error_of_a_compiled_step_is_raised(when, monkeypatch, caplog) -> None:
    failing_at(monkeypatch, when, RuntimeError("a fault"))
    agent = agent_with("default")
    with pytest.raises(RuntimeError, match="a fault"):
        learned(agent)
    assert agent.compiled.active
    assert not caplog.records


def test_errors_of_the_compiler_are_told_from_others() -> None:
    compiler = NO_COMPILER, CppCompileError(["g++"], ""), torch._dynamo.exc.TorchRuntimeError("")
    assert all(is_compiler_error(error) for error in compiler)
    others = (
        RuntimeError(""),
        torch.OutOfMemoryError(""),
        KeyError(""),
        torch.linalg.LinAlgError(""),
    )
    assert not any(is_compiler_error(error) for error in others)


@needs_compiler
def test_a_missing_compiler_is_an_error_of_the_compiler(monkeypatch) -> None:
    """Torch itself raises it, so an exception that moves to another package is noticed."""
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/nowhere/g++"))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="C\\+\\+ compiler") as caught:
        torch.compile(lambda x: x.sin() * 2.0)(torch.ones(3))
    assert is_compiler_error(caught.value)


def test_an_error_outside_the_compiler_is_raised() -> None:
    agent = agent_with("off")
    rollout = synthetic_rollout(agent, 4, 8, 2, seed=1)
    rollout.actions += 1000
    with pytest.raises((RuntimeError, IndexError)):
        agent.update(rollout)


@needs_compiler
@pytest.mark.slow
def test_compiled_and_eager_updates_agree() -> None:
    eager, compiled = learned(agent_with("off")), learned(agent_with("default"))
    for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
        assert compiled[name] == pytest.approx(eager[name], rel=1e-3, abs=1e-5), name
