"""The virtual device sees every kind of fault, and nothing where there is none."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from virtual_device import Fault, Machine, virtual_device

GPU = "cuda:0"


def ones(*shape: int, device: str = GPU) -> Tensor:
    return torch.ones(shape, device=device)


def waits(machine: Machine) -> list[str]:
    return sorted(operation for _, operation, _ in machine.syncs.elements())


def test_tensors_know_their_device_and_results_stay_there() -> None:
    with virtual_device(2):
        x = ones(3, 4, device="cuda:1")
        views = (x[1:], x.T, x.detach(), x.view(-1), x.unsqueeze(0))
        made = (x + 1.0, torch.zeros_like(x), x.new_full((2,), 3.0), x.to(torch.float64), x.sum())
        for each in (x, *views, *made):
            assert each.device == torch.device("cuda:1")
            assert each.is_cuda
            assert not each.is_cpu
            assert each.get_device() == 1
        assert torch.zeros(2).device.type == "cpu"
        assert torch.zeros_like(x, device="cpu").device.type == "cpu"
        assert x.cpu().device.type == "cpu"
        assert x.to(torch.zeros(1)).device.type == "cpu"
        assert torch.zeros(2).cuda(1).device == x.device
        assert torch.nn.Linear(2, 3).to("cuda:1").weight.device == x.device
    assert torch.zeros(2).device.type == "cpu"


def test_gradients_are_where_their_tensors_are() -> None:
    with virtual_device():
        x = torch.randn(2, 3).to(GPU).requires_grad_()
        host = torch.randn(3, 3, requires_grad=True)
        labels = torch.tensor([0, 2], device=GPU)
        torch.nn.functional.cross_entropy(x @ host.to(GPU), labels).backward()
        assert x.grad is not None
        assert host.grad is not None
        assert (x.grad.device.type, host.grad.device.type) == ("cuda", "cpu")


def backward_with_a_hook_on_the_host() -> None:
    x = ones(3).requires_grad_()
    y = x * 2.0
    y.register_hook(lambda gradient: gradient + torch.ones(3))
    y.sum().backward()


MIXED: dict[str, Callable[[], object]] = {
    "elementwise": lambda: ones(3) + torch.ones(3),
    "two devices": lambda: ones(3) + ones(3, device="cuda:1"),
    "product": lambda: ones(3, 3) @ torch.ones(3, 3),
    "concatenation": lambda: torch.stack([ones(3).sum(), torch.ones(())]),
    "in place": lambda: torch.ones(()).add_(ones(3).sum()),
    "index on another device": lambda: ones(3)[torch.tensor([0], device="cuda:1")],
    "host indexed by a device": lambda: torch.ones(3)[torch.tensor([0], device=GPU)],
    "gradient": backward_with_a_hook_on_the_host,
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_are_refused(name: str) -> None:
    with virtual_device(2) as machine:
        with pytest.raises(Fault, match=r"cpu beside|tensors on"):
            MIXED[name]()
        assert len(machine.faults) == 1


def test_what_torch_allows_is_allowed() -> None:
    with virtual_device(2) as machine:
        assert ones(3).copy_(ones(3, device="cuda:1")).get_device() == 0
        x = ones(3)
        number = torch.tensor(2.0)
        for y in (x + number, x * 3.0, torch.where(x > 0, number, x), x.clamp(number), x / number):
            assert y.is_cuda
        x[0] = 4.0
        x[x > 3] = 0.0
        x.masked_fill_(x > 3, number)
        assert waits(machine) == []
        assert x[torch.tensor([0, 1])].is_cuda
        assert waits(machine) == ["index with indices on the CPU"]
        assert sum(machine.pageable.values()) == 1
        assert not machine.faults


WAITS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (lambda x: x[0].item(), "_local_scalar_dense"),
    "bool": (lambda x: bool(x[0]), "_local_scalar_dense"),
    "int": (lambda x: int(x[0]), "_local_scalar_dense"), "tolist": (lambda x: x.tolist(), "tolist"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"), "mask": (lambda x: x[x > 0], "index"),
    "assignment to a mask": (lambda x: x.__setitem__(x > 0, x * 2.0), "index_put_"),
    "unique": (lambda x: x.unique(), "_unique2"), "equal": (lambda x: torch.equal(x, x), "equal"),
    "cpu": (lambda x: x.cpu(), "to"), "to": (lambda x: x.to("cpu"), "to"),
    "from the host": (lambda x: torch.ones(3).to(GPU), "to"),
    "tensor": (lambda x: torch.tensor([1.0], device=GPU), "tensor"),
    "new_tensor": (lambda x: x + x.new_tensor([1.0]), "new_tensor"),
    "copy_": (lambda x: x.copy_(torch.ones(3)), "copy_ from the host"),
    "synchronize": (lambda x: torch.cuda.synchronize(), "synchronize"),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_every_wait_is_logged(name: str) -> None:
    with virtual_device() as machine:
        x = ones(3)
        act, logged = WAITS[name]
        act(x)
        assert waits(machine) == [logged]
        assert {thread for thread, _, _ in machine.syncs} == {"MainThread"}


def test_copies_of_pageable_memory_are_logged_and_others_are_not() -> None:
    with virtual_device() as machine:
        torch.ones(3).to(GPU)
        torch.ones(3).to(GPU, non_blocking=True)
        ones(3).cpu()
        assert sum(machine.pageable.values()) == 3
        machine.pageable.clear()
        machine.syncs.clear()
        torch.ones(3).pin_memory().to(GPU, non_blocking=True)
        torch.ones(3, pin_memory=True).to(GPU, non_blocking=True)
        ones(3).to("cpu", non_blocking=True)
        assert not machine.pageable
        assert not machine.syncs


def test_an_asynchronous_copy_is_read_after_its_stream_was_waited_for() -> None:
    with virtual_device() as machine:
        for wait in (torch.cuda.synchronize, lambda: ones(1).item()):
            copy = ones(3).to("cpu", non_blocking=True)
            for read in (copy.tolist, copy.numpy, lambda: copy + 1.0):  # noqa: B023
                with pytest.raises(Fault, match="before it arrived"):
                    read()
            wait()
            assert copy.tolist() == [1.0] * 3
        event = torch.cuda.Event()
        copy = ones(3).to("cpu", non_blocking=True)
        event.record()
        later = ones(3).to("cpu", non_blocking=True)
        event.synchronize()
        assert copy.tolist() == [1.0] * 3
        with pytest.raises(Fault, match="before it arrived"):
            later.tolist()
        assert len(machine.faults) == 7


def test_the_source_of_an_asynchronous_copy_must_not_be_overwritten() -> None:
    with virtual_device():
        buffer = torch.ones(3, pin_memory=True)
        buffer.to(GPU, non_blocking=True)
        with pytest.raises(Fault, match="overwritten"):
            buffer.zero_()
        torch.cuda.synchronize()
        buffer.zero_()


ILLEGAL: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "wait": (lambda x: x.sum().item(), "_local_scalar_dense in a capture"),
    "shape from values": (lambda x: x.nonzero(), "nonzero in a capture"),
    "pageable copy": (lambda x: torch.ones(3).to(GPU, non_blocking=True), "pageable memory"),
    "constant of the host": (lambda x: torch.tensor([1.0], device=GPU), "pageable memory"),
    "another device": (lambda x: ones(3, device="cuda:1") + 1.0, "in a capture of cuda:0"),
    "generator": (lambda x: x.normal_(generator=torch.Generator()), "not registered"),
    "synchronize": (lambda x: torch.cuda.synchronize(), "synchronize in a capture"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_ends_a_capture_is_a_fault(name: str) -> None:
    with virtual_device(2) as machine:
        act, message = ILLEGAL[name]
        x = ones(3)
        with pytest.raises(Fault, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            act(x)
        assert not machine.is_capturing()


def test_work_on_another_stream_is_a_fault_in_a_capture() -> None:
    with virtual_device():
        x, other = ones(3), torch.cuda.Stream()
        with (
            pytest.raises(Fault, match="another stream"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
            torch.cuda.stream(other),
        ):
            x.add_(1.0)


@pytest.mark.parametrize(("mode", "faults"), [("global", 1), ("thread_local", 0)])
def test_another_thread_may_wait_only_if_the_capture_is_of_one_thread(
    mode: str, faults: int
) -> None:
    with virtual_device() as machine:
        x, event = ones(3), torch.cuda.Event()
        event.record()

        def wait() -> None:
            try:
                event.synchronize()
            except Fault:
                assert mode == "global"

        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
            x.add_(1.0)
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
        assert len(machine.faults) == faults


def test_a_capture_computes_nothing_and_a_replay_computes_all_again() -> None:
    with virtual_device() as machine:
        x, total = ones(3), torch.zeros(3, device=GPU)
        number = torch.tensor(2.0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            doubled = x * number
            total.add_(doubled)
            largest = total.max(0).values
        number.fill_(7.0)  # a number of the host is that of the capture
        assert doubled.isnan().all()
        assert total.tolist() == [0.0] * 3
        for value, expected in ((1.0, 2.0), (3.0, 8.0)):
            x.fill_(value)
            graph.replay()
            assert doubled.tolist() == [2.0 * value] * 3
            assert total.tolist() == [expected] * 3
            assert largest.item() == expected
        assert graph.replays == 2
        assert machine.launches["graph"] == 2


def test_an_empty_graph_is_a_fault() -> None:
    with virtual_device() as machine:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(3) + 1.0
        assert machine.faults == ["an empty graph was captured on cuda:0"]


def test_replayed_training_is_eager_training_bit_for_bit() -> None:
    def trained(captured: bool) -> list[Tensor]:
        torch.manual_seed(1)
        net = torch.nn.LSTM(3, 4).to(GPU)
        rate = torch.tensor(1e-2, device=GPU)
        adam = torch.optim.Adam(net.parameters(), lr=rate, fused=True, capturable=True)
        x = torch.randn(5, 2, 3).to(GPU)

        def step() -> None:
            adam.zero_grad()
            net(x)[0].square().sum().backward()
            adam.step()

        step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        for _ in range(3):
            graph.replay() if captured else step()
        return [p.detach().cpu() for p in net.parameters()]

    with virtual_device() as machine:
        for eager, replayed in zip(trained(False), trained(True), strict=True):
            assert torch.equal(eager, replayed)
        assert not machine.faults


def test_memory_is_counted_freed_and_limited() -> None:
    with virtual_device(capacity=1000) as machine:
        x = torch.zeros(100, device=GPU)
        assert torch.cuda.memory_allocated() == 400
        assert torch.cuda.mem_get_info() == (600, 1000)
        y = x + 1.0
        del y
        assert torch.cuda.memory_allocated() == 400
        assert torch.cuda.max_memory_allocated() == 800
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 400
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(151, device=GPU)
        assert not machine.faults
        del x
        assert torch.cuda.memory_allocated() == 0


def test_launches_are_operations_that_compute() -> None:
    with virtual_device() as machine:
        x = ones(4, 4)
        machine.launches.clear()
        x.view(2, 8).T.detach()[0].unsqueeze(0)
        torch.empty_like(x)
        torch.ones(3) + 1.0
        assert not machine.launches
        (x @ x).add_(1.0)
        assert sum(machine.launches.values()) == 2


def test_threads_started_within_are_observed_and_later_ones_are_not() -> None:
    with virtual_device() as machine:
        thread = threading.Thread(target=lambda: ones(1).item(), name="other")
        thread.start()
        thread.join()
        assert {name for name, _, _ in machine.syncs} == {"other"}
    assert not torch.cuda.is_available()


def test_autocast_to_the_device_computes_in_half_precision() -> None:
    with virtual_device(), torch.autocast("cuda", dtype=torch.bfloat16):
        assert (ones(3, 3) @ ones(3, 3)).dtype == torch.bfloat16
