"""Tensors as values: what they are on arrival, how many bytes travel, whose memory they lie in."""

from __future__ import annotations

import copyreg
import dataclasses
import errno
import gc
import mmap
import pickle
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from stoker.exceptions import SerializationError
from stoker.runtime.serialization.pickling import Packed, pack, unpack
from tests.unit.sdk.packing import inline, protected, store, stored, travel

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch", reason="needs torch (the `train` extra)")

from stoker.runtime.serialization import tensors  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = 100_000


def assert_same(found: Any, sent: Any) -> None:
    assert type(found) is type(sent)
    assert (found.dtype, found.shape, found.device) == (sent.dtype, sent.shape, sent.device)
    assert (found.layout, found.requires_grad) == (sent.layout, sent.requires_grad)
    found, sent = found.detach(), sent.detach()
    if sent.is_quantized:
        assert torch.equal(found.int_repr(), sent.int_repr())
    elif sent.layout is not torch.strided:
        assert torch.equal(found.to_dense(), sent.to_dense())
    else:
        assert bits(found) == bits(sent)


def bits(tensor: Any) -> list[int]:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return list(plain.view(torch.uint8).tolist()) if plain.numel() else []


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex128, torch.complex64, torch.complex32, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def pattern(count: int, dtype: Any) -> Any:
    """A tensor of any type, of bytes that are valid in each."""
    return (torch.arange(count * dtype.itemsize) % 2).to(torch.uint8).view(dtype)


@pytest.mark.parametrize("lay", [stored, protected, inline])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_each_dtype_comes_back_with_its_bits(dtype: Any, lay: Any) -> None:
    for sent in (
        pattern(6, dtype),
        pattern(6, dtype).reshape(2, 3).T,
        pattern(1, dtype).reshape(()),
        pattern(0, dtype),
    ):
        assert_same(travel(sent, lay), sent)


def base() -> Any:
    return torch.arange(LARGE, dtype=torch.float32).reshape(100, 1000)


VIEWS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "whole": (lambda b: b, LARGE),
    "transposed": (lambda b: b.T, LARGE),
    "row": (lambda b: b[3], 1000),
    "rows": (lambda b: b[3:5], 2000),
    "column": (lambda b: b[:, 7], 100),
    "grid": (lambda b: b[::2, ::5], 50 * 200),
    "element": (lambda b: b[5, 5], 1),
    "empty": (lambda b: b[5:5], 0),
    "scalar repeated": (lambda b: b[0, :1].expand(50, 60), 1),
    "column repeated": (lambda b: b[:, 7].expand(30, 100), 100),
    "column repeated to the right": (lambda b: b[:, 7:8].expand(100, 30), 100),
    "windows": (lambda b: b[0, :20].unfold(0, 5, 1), 20),
    "ones": (lambda b: b[:1, None].movedim(2, 0), 1000),
    "channels last": (lambda b: b.view(10, 10, 10, 100).contiguous(memory_format=CHANNELS), LARGE),
}
CHANNELS = torch.channels_last


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_ships_its_own_bytes_and_no_others(name: str) -> None:
    view, elements = VIEWS[name]
    sent = view(base())
    packed = pack(sent, what="value")
    assert sum(b.nbytes for b in packed.buffers) == elements * 4
    assert len(packed.data) < 1000
    found = unpack(packed.data, stored(packed), what="value")
    assert_same(found, sent)
    assert [s == 0 for s in found.stride()] == [s == 0 for s in sent.stride()]


def test_strides_that_can_be_kept_are_kept() -> None:
    image = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert travel(image).stride() == image.stride()
    assert travel(base().T).stride() == (1, 1000)
    assert travel(torch.empty(0, 7).T).stride() == torch.empty(0, 7).T.stride()


SPECIAL: dict[str, Callable[[], Any]] = {
    "leaf": lambda: torch.zeros(3, requires_grad=True),
    "not a leaf": lambda: torch.zeros(3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 3)),
    "frozen": lambda: torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False),
    "conj": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "neg": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "sparse": lambda: torch.eye(4).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8),
    "meta": lambda: torch.empty(2, 3, device="meta"),
}


@pytest.mark.parametrize("lay", [stored, protected, inline])
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_what_is_special_about_a_tensor_comes_back(name: str, lay: Any) -> None:
    sent = SPECIAL[name]()
    packed = pack(sent, what="value")
    found = unpack(packed.data, lay(packed), what="value")
    if sent.device.type == "meta":
        assert (found.device, found.shape) == (sent.device, sent.shape)
        return
    assert_same(found, sent)
    assert found.is_leaf


def test_attributes_of_a_tensor_come_back_and_its_grad_does_not() -> None:
    sent = torch.nn.Parameter(torch.ones(3))
    sent.sum().backward()
    sent.rank = [1, torch.zeros(2)]
    sent.itself = sent
    found = travel(sent)
    assert found.itself is found
    assert found.rank[0] == 1
    assert_same(found.rank[1], sent.rank[1])
    assert found.grad is None


class Tagged(torch.Tensor):
    """A user's subclass: torch's own pickling keeps its type."""


def test_a_subclass_keeps_its_type() -> None:
    sent = torch.arange(4.0).as_subclass(Tagged)
    found = travel(sent)
    assert type(found) is Tagged
    assert found.tolist() == sent.tolist()


# -- memory ------------------------------------------------------------------------------------------


def test_a_stored_tensor_is_a_view_of_the_arenas_file_and_may_be_written() -> None:
    sent = torch.ones(1 << 22)
    packed = pack([sent, sent * 2, np.arange(5)], what="value")
    views = stored(packed)

    def read() -> Any:
        return unpack(packed.data, views, what="value")

    before = anonymous_nbytes()
    (one, two, numbers), other = read(), read()
    assert float(one.sum() + two.sum()) == 3 << 22
    assert anonymous_nbytes() - before < 4 << 20, "32 MiB were copied"
    assert two.data_ptr() - one.data_ptr() == sent.nbytes, "they lie in one mapping"
    assert one.data_ptr() % 64 == 0
    one.mul_(0)
    numbers_sum = int(numbers.sum())
    assert float(one.sum()) == 0
    assert float(two.sum()) == 2 << 22
    assert (float(other[0].sum()), numbers_sum) == (1 << 22, 10)
    assert float(read()[0].sum()) == 1 << 22


def test_memory_under_a_tensor_is_not_used_again_before_the_tensor_is_gone(tmp_path: Path) -> None:
    packed = pack([torch.ones(1 << 20)], what="value")
    arena = store(packed, tmp_path)
    inode = (tmp_path / "o_1").stat().st_ino
    (found,) = unpack(*arena.read("o_1"), what="value")
    row = found[5:]
    del found
    gc.collect()
    assert arena.recycle("o_1")
    other = arena.create(packed.nbytes)
    assert other.inode != inode
    assert float(row.sum()) == (1 << 20) - 5
    del row
    gc.collect()
    again = arena.create(packed.nbytes)
    assert again.inode == inode
    for extent in (other, again):
        extent.discard()
    arena.close()


def anonymous_nbytes() -> int:
    """Memory of this process that is a copy of nothing."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_where_no_more_can_be_mapped_a_stored_tensor_is_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = pack(base(), what="value")
    views = stored(packed)

    class Exhausted(mmap.mmap):
        def __new__(cls, *args: Any, **kwargs: Any) -> Exhausted:
            raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(tensors.mmap, "mmap", Exhausted)
        found = unpack(packed.data, views, what="value")
    found.mul_(0)
    assert torch.equal(unpack(packed.data, views, what="value"), base())


def test_a_tensor_keeps_its_mapping() -> None:
    row = travel(base())[5]
    again = [travel(torch.full((LARGE,), 7.0)) for _ in range(3)]
    assert row.tolist() == base()[5].tolist()
    del again


@pytest.mark.parametrize("lay", [protected, inline])
def test_a_tensor_in_memory_that_must_not_change_is_a_copy(lay: Any) -> None:
    packed = pack(base(), what="value")
    views = lay(packed)
    before = bytes(views[0])
    found = unpack(packed.data, views, what="value")
    found.mul_(0)
    assert bytes(views[0]) == before
    assert found.data_ptr() % 64 == 0


def test_packing_copies_nothing_that_is_dense() -> None:
    sent = base()
    (buffer,) = pack([sent[2:4]], what="value").buffers
    sent[2, 0] = -1
    assert np.frombuffer(buffer, np.float32)[0] == -1


def test_a_packed_tensor_outlives_the_one_it_was_made_from() -> None:
    def one() -> Packed:
        return pack(torch.full((LARGE,), 3.0) + 1, what="value")

    packs = [one() for _ in range(3)]
    assert all((np.frombuffer(p.buffers[0], np.float32) == 4).all() for p in packs)


def test_a_packer_holds_nothing_of_what_it_packed() -> None:
    kept = []
    for value in ([base()], [base(), lambda: 1]):
        kept.append(weakref.ref(value[0]))
        pack(value, what="value")
        value.clear()
    del value
    with pytest.raises(SerializationError):
        broken = [base(), threading.Lock()]
        kept.append(weakref.ref(broken[0]))
        pack(broken, what="value")
    broken.clear()
    gc.collect()
    assert [r() for r in kept] == [None, None, None]


def test_arrays_stay_read_only_where_tensors_are_not() -> None:
    numbers, tensor = travel([np.arange(5), torch.arange(5)])
    with pytest.raises(ValueError, match="read-only"):
        numbers[0] = 1
    tensor[0] = 1


# -- sharing -----------------------------------------------------------------------------------------


def test_equal_extents_travel_once_and_stay_shared() -> None:
    weight = base()
    packed = pack({"a": weight, "b": weight.detach(), "c": weight.view(-1)}, what="value")
    assert packed.nbytes < LARGE * 4 + 2000
    found = unpack(packed.data, stored(packed), what="value")
    found["a"][0, 0] = 5
    assert found["b"][0, 0] == found["c"][0] == 5


def test_the_same_tensor_twice_is_the_same_tensor() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    one, two = travel([weight, weight])
    assert one is two


def test_other_overlaps_arrive_apart() -> None:
    whole = base()
    found = travel([whole, whole[0]])
    found[0][0, 0] = 5
    assert found[1][0] == 0


def test_tensors_made_while_pickling_are_not_confused() -> None:
    """Their addresses may be used again by the next one."""

    class Maker:
        def __init__(self, number: int) -> None:
            self.number = number

        def __reduce__(self) -> Any:
            return list, ([torch.full((64,), float(self.number)) * 1],)

    found = travel([Maker(i) for i in range(50)])
    assert [int(t[0][0]) for t in found] == list(range(50))


# -- values full of tensors -----------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    inputs: Any
    more: dict[str, Any]


def test_tensors_inside_values() -> None:
    sent = Batch(torch.arange(5), {"x": [torch.ones(2), (torch.zeros(1), np.arange(3))]})
    found = travel(sent)
    assert_same(found.inputs, sent.inputs)
    assert_same(found.more["x"][0], sent.more["x"][0])
    assert found.more["x"][1][1].tolist() == [0, 1, 2]


def test_tensors_go_out_of_band_by_cloudpickle_too() -> None:
    weight = base()

    class Local:
        def __init__(self) -> None:
            self.weight = weight[0]

    packed = pack([Local(), lambda x: x + weight], what="value")
    assert sorted(b.nbytes for b in packed.buffers) == [4000, LARGE * 4]
    local, add = unpack(packed.data, stored(packed), what="value")
    assert_same(local.weight, weight[0])
    assert torch.equal(add(1), weight + 1)


def test_a_model_and_its_optimizer_come_back_ready_to_train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    model.append(torch.nn.Linear(4, 4))
    model[3].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model: Any, optimizer: Any) -> Any:
        optimizer.zero_grad()
        model(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
        optimizer.step()
        return model.state_dict()

    step(model, optimizer)
    other = travel(model)
    assert other[3].weight is other[0].weight
    again = torch.optim.AdamW(other.parameters())
    again.load_state_dict(travel(optimizer.state_dict()))
    state = travel(model.state_dict())
    assert type(state) is OrderedDict
    assert state["0.weight"].data_ptr() == state["3.weight"].data_ptr()
    expected, found = step(model, optimizer), step(other, again)
    assert all(torch.equal(expected[k], found[k]) for k in expected)


def test_threads_pack_at_the_same_time() -> None:
    wrong: list[int] = []

    def run(number: int) -> None:
        for _ in range(20):
            sent = [torch.full((500,), float(number)), number]
            found = travel(sent, inline)
            if found[0].tolist() != sent[0].tolist() or found[1] != number:
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def test_packing_while_packing() -> None:
    class Outer:
        def __reduce__(self) -> Any:
            inner = pack([torch.ones(3)], what="inner")
            return list, ([bytes(b) for b in inner.buffers],)

    weight = torch.zeros(4)
    (floats, found) = travel([Outer(), weight])
    assert floats == [bytes(np.ones(3, np.float32))]
    assert_same(found, weight)


# -- everybody else's pickles ---------------------------------------------------------------------------


def test_users_own_pickles_are_as_they_were() -> None:
    before = dict(copyreg.dispatch_table)
    travel([torch.ones(2)])
    assert copyreg.dispatch_table == before
    assert b"stoker" not in pickle.dumps(torch.ones(2), 5)


def test_registrations_of_users_count() -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    pack([1, torch.ones(1)], what="value")
    copyreg.pickle(Point, lambda p: (complex, (p.x, 0)))
    try:
        assert travel([Point(3)]) == [3 + 0j]
    finally:
        del copyreg.dispatch_table[Point]


def run_python(script: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", script], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_packing_imports_neither_torch_nor_numpy() -> None:
    run_python(
        "import sys, stoker\n"
        "from stoker.runtime.serialization.pickling import pack\n"
        "pack([1, {'a': (2,)}, lambda: 1], what='value')\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
    )


def test_without_numpy_tensors_travel_by_torchs_own_way() -> None:
    """And with nothing loaded yet, the reader loads what it needs."""
    run_python(
        "import sys; sys.modules['numpy'] = None\n"
        "import torch\n"
        "from stoker.runtime.serialization.pickling import pack, unpack\n"
        "p = pack([torch.arange(3)], what='value')\n"
        "assert unpack(p.data, p.buffers, what='value')[0].tolist() == [0, 1, 2]\n"
    )
    packed = pack([torch.arange(3)], what="value")
    stream, buffers = packed.data, [bytes(b) for b in packed.buffers]
    assert (
        run_python(
            "from stoker.runtime.serialization.pickling import unpack\n"
            f"print(unpack({stream!r}, {buffers!r}, what='value')[0].sum().item())"
        )
        == "3\n"
    )


def test_the_first_tensor_of_a_process_without_numpy_is_a_view_too(tmp_path: Path) -> None:
    packed = pack([torch.ones(1 << 22)], what="value")
    store(packed, tmp_path).close()
    assert (
        run_python(
            "import sys\n"
            "from stoker_wire.arena import Arena\n"
            f"data, buffers = Arena({str(tmp_path)!r}).read('o_1')\n"
            "assert 'numpy' not in sys.modules\n"
            "from stoker.runtime.serialization.pickling import unpack\n"
            "(found,) = unpack(data, buffers, what='value')\n"
            "found[::1024] = 0\n"
            "import numpy\n"
            "address = numpy.frombuffer(buffers[0], numpy.uint8).__array_interface__['data'][0]\n"
            "print(found.sum().item(), found.data_ptr() == address)\n",
            "-Werror::UserWarning",
        )
        == f"{(1 << 22) - (1 << 12)}.0 True\n"
    )


def test_the_readers_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        found = travel([torch.ones(3, device="cpu"), torch.empty(0, device="cpu")])
    assert [t.device.type for t in found] == ["cpu", "cpu"]
    assert found[0].tolist() == [1, 1, 1]


# -- CUDA's policy, without CUDA ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "current", "chosen"),
    [
        ((), 0, None),
        (("a", "b"), 0, 1),
        (("b",), 0, 0),
        (("a", "c"), 0, 0),
        (("a", "c"), 1, 1),
        (("a", "b"), 0, 1),
    ],
)
def test_a_cuda_tensor_goes_to_its_own_gpu_or_the_current_or_stays_on_the_cpu(
    visible: tuple[str, ...], current: int, chosen: int | None
) -> None:
    assert tensors.choose_device("b", visible, current) == chosen


def test_gpus_are_known_by_their_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [SimpleNamespace(uuid="a"), SimpleNamespace(uuid="b")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    asked: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: asked.append(device) or tensor)
    tensors.restore(b"1234", "b")
    assert asked == [torch.device("cuda", 1)]


def test_a_cuda_tensor_stays_in_host_memory_where_no_gpu_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    sent = base()
    for view in (stored, inline):
        (buffer,) = view(pack(sent, what="value"))
        storage = tensors.restore(buffer, "GPU-1")
        found = tensors.rebuild(storage, sent.dtype, (100, 1000), (1000, 1), False, False)
        assert_same(found, sent)


def test_cuda_is_asked_nothing_for_tensors_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> int:
        raise AssertionError("CUDA was touched for a CPU tensor")

    monkeypatch.setattr(torch.cuda, "device_count", asked)
    monkeypatch.setattr(torch.cuda, "current_device", asked)
    monkeypatch.setattr(torch.cuda, "is_available", asked)
    travel([base(), torch.nn.Parameter(torch.ones(2))])
