"""Where an optimizer's tensors lie: memory formats, parameters replaced, pinned memory for captures."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker_kernels import SGD, AdamW
from stoker_kernels.optim import table


@pytest.mark.parametrize(("ours", "theirs"), [(AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)])
def test_states_follow_the_memory_format(backend: str, ours: Any, theirs: Any) -> None:
    """Updates walk memory: a state laid out as the parameter once was would meet other elements."""
    finals = []
    options = {"momentum": 0.9} if ours is SGD else {}
    grads = torch.randn(2, 3, 4, 2, 2)
    for kind in (ours, theirs):
        torch.manual_seed(0)
        layer = torch.nn.Conv2d(4, 3, 2, bias=False)
        optimizer = kind(layer.parameters(), lr=0.1, **options)
        for grad in grads:
            layer.weight.grad = grad
            optimizer.step()
            layer.to(memory_format=torch.channels_last)
        finals.append(layer.weight.detach())
    torch.testing.assert_close(*finals)


def test_parameters_replaced_by_others(backend: str) -> None:
    """``.data`` takes anything; memory of another size must not be walked."""
    p = torch.nn.Parameter(torch.randn(8, 3))
    p.grad = torch.randn(8, 3)
    optimizer = AdamW([p])
    optimizer.step()
    p.data = torch.ones(16, 3)
    with pytest.raises(ValueError, match=r"shape \(16, 3\) has a gradient of shape \(8, 3\)"):
        optimizer.step()
    p.grad = torch.ones(16, 3)
    with pytest.raises(ValueError, match=r"shape \(16, 3\) has a state of shape \(8, 3\)"):
        optimizer.step()
    p.data, p.grad = torch.ones(8, 6)[:, ::2], torch.ones(8, 6)[:, ::2]
    with pytest.raises(ValueError, match="gaps or overlaps"):
        optimizer.step()


def test_each_table_of_a_step_has_pinned_memory_for_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two groups of equal sizes, and clipping: four tables of one size, none pinned in the capture."""
    capturing, pinned, used = False, [], []

    def pin(size: int) -> torch.Tensor:
        assert not capturing, "a capture may not allocate pinned memory"
        pinned.append(torch.zeros(size, dtype=torch.int64))
        return pinned[-1]

    def build(*args: Any) -> table.Table:
        used.append(args[-1])
        return table.Table(args[-1], args[-1], (), 0)

    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(table, "_reserved", {})
    monkeypatch.setattr(table, "_read_by_graphs", [])
    monkeypatch.setattr(table, "_pinned", pin)
    monkeypatch.setattr(table, "_cached", lambda *_: None)
    monkeypatch.setattr(table, "_build", build)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)

    def tensor(address: int) -> Any:
        device = torch.device("cuda", 0)
        return SimpleNamespace(data_ptr=lambda: address, numel=lambda: 24, device=device)

    def step(grads: int) -> None:
        for group in (0, 1):
            p, count = [tensor(64 + group)], [tensor(128 + group)]
            table.table_of((p, [tensor(grads + group)], [], [], []), 8192)
            table.table_of((p, [tensor(grads + group)], [], [], count), 8192)

    step(grads=256)
    step(grads=512)
    assert len(pinned) == 4
    capturing = True
    step(grads=1024)
    assert len({id(host) for host in used}) == 4
    assert all(kept is host for kept, host in zip(table._read_by_graphs, used, strict=True))
    capturing = False
    step(grads=256)
    assert len(pinned) == 8


def test_momentum_that_begins_late_begins_as_torch_s(backend: str) -> None:
    finals = []
    for kind in (SGD, torch.optim.SGD):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([p], lr=0.1, dampening=0.5)
        for momentum in (0.0, 0.9, 0.9):
            optimizer.param_groups[0]["momentum"] = momentum
            p.grad = torch.ones(3)
            optimizer.step()
        finals.append(p.detach())
    torch.testing.assert_close(*finals)


def test_a_checkpoint_is_loaded_into_the_states_there_are() -> None:
    """A captured step goes on reading and writing them."""
    p = torch.nn.Parameter(torch.ones(4, 3))
    p.grad = torch.ones(4, 3)
    optimizer = AdamW([p])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    held = dict(optimizer.state[p])
    optimizer.load_state_dict(saved)
    assert optimizer.state[p].keys() == held.keys()
    for name, value in optimizer.state[p].items():
        assert value.data_ptr() == held[name].data_ptr()
        assert torch.equal(value, saved["state"][0][name])
        assert value.data_ptr() != saved["state"][0][name].data_ptr()
