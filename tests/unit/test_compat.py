"""Each private name of torch is in the torch that is installed, and does what is relied on."""

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.fsdp import FlatParameter, _common_utils
from torch.utils.data import DataLoader, IterableDataset

from distcheck.machine import compat
from tests.world import warm


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """The default group, of gloo, with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("place", compat.PLACES, ids=lambda place: place.name)
def test_functions_that_are_replaced_are_there(place: compat.Replaceable) -> None:
    assert callable(getattr(place.owner, place.name))


def test_replacements_are_called(monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup) -> None:
    """Torch's public functions call the private ones by these names."""
    called: list[str] = []

    def noting(place: compat.Replaceable) -> None:
        monkeypatch.setattr(place.owner, place.name, getattr(place.owner, place.name))  # to undo it
        place.replace(lambda real: lambda *a, **k: (called.append(place.name), real(*a, **k))[1])

    for place in (compat.MAKE_GROUP, compat.START_CUDA, compat.COLLECT_FUTURES):
        noting(place)
    dist.destroy_process_group(dist.new_group([0]))
    with contextlib.suppress(RuntimeError, AssertionError):  # without a GPU
        torch.zeros(1).cuda()
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(1)
    torch.futures.collect_all([future]).wait()
    torch.futures.wait_all([future])
    assert {compat.MAKE_GROUP.name, compat.COLLECT_FUTURES.name} <= set(called)
    assert called.count(compat.COLLECT_FUTURES.name) == 2
    if torch.backends.cuda.is_built():
        assert compat.START_CUDA.name in called


def test_ddp_finds_syncbatchnorm(monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup) -> None:
    model = nn.SyncBatchNorm(2)
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        nn.parallel.DistributedDataParallel(model)
    place = compat.CHECK_SYNC_BATCHNORM
    monkeypatch.setattr(place.owner, place.name, getattr(place.owner, place.name))
    place.replace(lambda _: lambda *_: None)
    nn.parallel.DistributedDataParallel(model)


def test_every_name_of_hooks_is_there() -> None:
    module = nn.Linear(1, 1)
    assert all(hasattr(module, name) for name in compat.OF_MODULES)
    assert all(hasattr(module.weight, name) for name in compat.OF_TENSORS)
    optimizer = torch.optim.SGD(module.parameters())
    assert all(hasattr(optimizer, name) for name in compat.OF_OPTIMIZERS)


def test_kinds_of_layers() -> None:
    assert all(issubclass(kind, compat.BatchNorm) for kind in (nn.BatchNorm2d, nn.SyncBatchNorm))
    assert issubclass(nn.BatchNorm1d, compat.NormBase)
    assert issubclass(nn.InstanceNorm2d, compat.NormBase)
    assert not issubclass(nn.InstanceNorm2d, compat.BatchNorm)
    assert all(issubclass(kind, compat.Conv) for kind in (nn.Conv1d, nn.ConvTranspose3d))
    assert issubclass(nn.ConvTranspose1d, compat.ConvTranspose)
    assert not issubclass(nn.Conv1d, compat.ConvTranspose)
    assert compat.tree_leaves([1, {"a": (2, 3)}]) == [1, 2, 3]


def test_hooks_are_seen_when_they_are_registered() -> None:
    module = nn.Linear(1, 1)
    assert not compat.hooks_of(module)
    assert not compat.hooks_of(module.weight)
    module.register_forward_hook(print)
    module.register_forward_pre_hook(print)
    module.register_full_backward_hook(print)
    module.register_full_backward_pre_hook(print)
    assert {kind for kind, _ in compat.hooks_of(module)} == set(compat.OF_MODULES)
    module.weight.register_hook(print)
    module.weight.register_post_accumulate_grad_hook(print)
    assert {kind for kind, _ in compat.hooks_of(module.weight)} == set(compat.OF_TENSORS)


def test_hooks_before_a_step_are_seen() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    assert not compat.has_step_hooks(optimizer)
    handle = optimizer.register_step_pre_hook(print)
    assert compat.has_step_hooks(optimizer)
    handle.remove()
    assert not compat.has_step_hooks(optimizer)


@pytest.mark.sweep  # of torch itself, as its versions are tried
def test_what_wrappers_add_to_names() -> None:
    """By the constants of torch's own modules; of torch.compile, by what it makes, which imports
    the compiler and so is made in a process of its own.
    """
    assert _common_utils.FSDP_WRAPPED_MODULE in compat.WRAPPERS
    assert checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE in compat.WRAPPERS
    program = (
        "import torch; compiled = torch.compile(torch.nn.Linear(1, 1))\n"
        "print(next(name for name, _ in compiled.named_parameters()))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == f"{compat.COMPILED}.weight\n", ran.stderr


@pytest.mark.sweep  # as below, of what is compiled under a mode
def test_what_is_compiled_says_so() -> None:
    """After torch.compile(module), and after the module's own compile()."""
    program = (
        "import torch\n"
        "from distcheck.machine.compat import is_compiled\n"
        "one = torch.nn.Linear(1, 1)\n"
        "print(is_compiled(one), is_compiled(torch.compile(one)))\n"
        "one.compile(backend='eager')\n"
        "print(is_compiled(one))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "True", "True"], ran.stderr


def test_a_version_says_that_a_tensor_was_written_to() -> None:
    one = torch.zeros(2)
    before = compat.version_of(one)
    assert compat.version_of(one) == before
    one.add_(1)
    assert compat.version_of(one) != before
    with torch.inference_mode():
        assert compat.version_of(torch.zeros(2)) is None


def test_what_operators_write_to_and_draw() -> None:
    aten = torch.ops.aten
    assert compat.written_arguments(aten.add_.Tensor)["self"] == "self"
    assert compat.written_arguments(aten.addmm.out)["out"] == "out"
    assert not any(compat.written_arguments(aten.addmm.default).values())
    assert compat.written_arguments(print) == {}
    assert compat.draws_random_numbers(aten.bernoulli.default)
    assert not compat.draws_random_numbers(aten.mm.default)


@pytest.mark.sweep
def test_under_a_mode_for_operators_code_is_compiled() -> None:
    """Other modes run it eagerly: a job would be another one."""
    program = (
        "import torch, torch._dynamo.utils as counted\n"
        "from distcheck.machine.compat import OpMode\n"
        "class Mode(OpMode):\n"
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):\n"
        "        return func(*args, **(kwargs or {}))\n"
        "one = torch.compile(torch.nn.Linear(1, 1), backend='aot_eager')\n"
        "with Mode():\n"
        "    one(torch.ones(1, 1))\n"
        "print(counted.counters['stats']['unique_graphs'])\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "1\n", ran.stderr


def test_fsdp_marks_its_tensors() -> None:
    taken, marked = compat.OF_FSDP1
    assert getattr(FlatParameter(torch.ones(1)), taken)
    assert marked == _common_utils.FSDP_FLATTENED


def test_fsdp2_says_what_it_computes_with(tmp_path: Path) -> None:
    """Of a group of one process, in a process of its own."""
    program = (
        "import torch, torch.distributed as dist\n"
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n"
        "from distcheck.machine import compat\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "mesh = dist.device_mesh.init_device_mesh('cpu', (1,))\n"
        "short, plain = torch.bfloat16, torch.float32\n"
        "policies = MixedPrecisionPolicy(param_dtype=short, reduce_dtype=plain), "
        "MixedPrecisionPolicy()\n"
        "for policy in policies:\n"
        "    one = fully_shard(torch.nn.Linear(2, 2), mesh=mesh, mp_policy=policy)\n"
        "    print(*compat.fsdp2_dtypes(one))\n"
        "    wholes = lambda: [whole for own, whole in compat.fsdp2_parameters(one)]\n"
        "    assert wholes() == [None, None]\n"
        "    one.set_requires_gradient_sync(False)\n"
        "    one(torch.ones(2, 2)).sum().backward()\n"
        "    assert [tuple(whole.shape) for whole in wholes()] == [(2, 2), (2,)]\n"
        "    own = dict(compat.fsdp2_parameters(one))\n"
        "    assert [id(p) for p in own] == [id(p) for p in one.parameters()]\n"
        "    assert [compat.shard_offset(p) for p in own] == [(0, 0), (0,)]\n"
        "    print(*(holds() for _, holds in compat.fsdp2_holding(one)))\n"
        "linear = torch.nn.Linear(2, 2)\n"
        "print(compat.fsdp2_dtypes(linear)[0], [*compat.fsdp2_parameters(linear)])\n"
    )
    ran = warm.run(program, cwd=tmp_path, program="-c")
    *lines, plain, last = ran.stdout.splitlines() or ["", ""]
    assert lines == ["torch.bfloat16 torch.float32", "True True", "None None"], ran.stderr
    # Without a dtype to reduce in, some releases leave them in the gradient of the whole one.
    assert plain in ("True True", "False False")
    assert last == "None []", ran.stderr


def test_many_tensors_are_copied_at_once() -> None:
    to = [torch.zeros(2), torch.zeros(3)]
    compat.copy_each(to, [torch.ones(2), torch.full((3,), 2.0)])
    assert [t.tolist() for t in to] == [[1, 1], [2, 2, 2]]


def test_ddp_says_how_long_it_took(group: dist.ProcessGroup) -> None:
    assert not compat.ddp_times(None)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    for _ in range(12):  # it measures some of them
        model(torch.ones(1, 1)).sum().backward()
    times = compat.ddp_times(model)
    assert {"avg_backward_comm_time", "avg_backward_compute_comm_overlap_time"} <= times.keys()


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([5, 6])


def test_data_loaders_take_indices_and_samples_by_these_names() -> None:
    loader = DataLoader([10, 11, 12, 13], batch_size=2)
    iterator = iter(loader)
    assert isinstance(iterator, compat.LoaderIterator)
    assert {"__next__", "__init__", "_reset"} <= vars(compat.LoaderIterator).keys()
    seen: list[list[int]] = []
    compat.wrap_index_iterator(iterator, lambda given: (seen.append(one) or one for one in given))
    assert [batch.tolist() for batch in iterator] == [[10, 11], [12, 13]]
    assert seen == [[0, 1], [2, 3]]
    fetcher = compat.MapFetcher(loader.dataset, True, loader.collate_fn, drop_last=False)
    assert fetcher.auto_collation
    assert fetcher.fetch([1, 2]).tolist() == [11, 12]
    several = compat.IterableFetcher(Numbers(), True, loader.collate_fn, drop_last=False)
    assert several.fetch([0, 0]).tolist() == [5, 6]


def test_backward_is_seen_and_its_end(group: dist.ProcessGroup) -> None:
    seen: list[object] = []

    def note(_: torch.Tensor) -> None:
        seen.append(compat.is_in_backward())
        frame = sys._getframe(1)
        seen.append((frame.f_code.co_filename, frame.f_code.co_name))
        compat.after_backward(lambda: seen.append("end"))

    weight = torch.ones(1, requires_grad=True)
    doubled = weight * 2  # no leaf: hooks of those may be called by distcheck's
    doubled.register_hook(note)
    doubled.sum().backward()
    assert not compat.is_in_backward()
    inside, (file, function), end = seen
    assert inside is True
    assert end == "end"
    assert any(file.endswith(f) and n in ("", function) for f, n in compat.MAY_WAIT)
    assert function in compat.WAIT_FOR_FUTURES


def test_where_torch_waits_is_there() -> None:
    folder = Path(torch.__file__).parents[1]
    for file, function in compat.MAY_WAIT:
        assert f"def {function}" in (folder / file).read_text()
    ddp = (folder / "torch/nn/parallel/distributed.py").read_text()
    assert all(f"{name}(" in ddp for name in compat.WAIT_FOR_FUTURES[1:])


def test_a_future_of_cpp_has_callbacks() -> None:
    called: list[bool] = []
    future: torch.futures.Future[int] = torch.futures.Future()
    compat.BaseFuture.add_done_callback(future, lambda _: called.append(True))
    future.set_result(1)
    assert called == [True]
    assert isinstance(torch.futures.collect_all([future]), compat.BaseFuture)


def test_nodes_say_what_they_are_of(group: dist.ProcessGroup) -> None:
    mean = torch.ones(3, 2, requires_grad=True).mean(0)
    about = compat.output_of_node(mean.grad_fn, 0)
    assert tuple(about.shape) == (2,)
    assert about.dtype is torch.float32
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1), static_graph=True)
    output = model(torch.ones(1, 1))  # keeps the node: torch 2.11's knows its name no longer
    node = output.grad_fn
    assert node is not None
    assert node.name().removesuffix("Backward") == compat.DDP_NODE


class Noting(compat.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        schema = compat.schema_of(func)
        writes = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        self.seen.append(f"{schema.name} {writes}")
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_are_put_on_and_taken_off() -> None:
    mode, value = Noting(), torch.ones(1)
    assert mode not in compat.dispatch_modes()
    compat.push_mode(mode)
    assert compat.dispatch_modes()[-1] is mode
    value.add_(1)
    with compat.without_modes():
        value.add_(1)
    compat.pop_mode()
    value.add_(1)
    assert mode.seen == ["aten::add_ ['self']"]


def test_process_groups(group: dist.ProcessGroup) -> None:
    assert list(compat.groups()) == [group]
    assert compat.count_of_created_groups() >= 1
    assert compat.groups_state().pg_map is compat.groups()
    assert compat.fresh_groups_state().keys() == vars(compat.groups_state()).keys()
    compat.default_store().set("key", "value")
    assert compat.default_store().get("key") == b"value"
    assert compat.timeout_of(group) > timedelta(0)
    assert compat.functional_collectives() == 0


def test_a_storage_is_known_by_a_reference_that_keeps_no_memory() -> None:
    tensor, other = torch.ones(4), torch.ones(4)
    storage = compat.weak_storage(tensor)
    assert storage == compat.weak_storage(tensor[1:])
    assert storage != compat.weak_storage(other)
    assert not storage.expired()
    del tensor
    assert storage.expired()


def test_groups_count_their_calls(group: dist.ProcessGroup) -> None:
    assert compat.counts_calls()
    before = compat.calls_counted(group)
    dist.all_reduce(torch.ones(1))
    assert compat.calls_counted(group) == before + 1


RECORDING = """
import os, torch, torch.distributed as dist
from distcheck.machine import compat
from tests.world import warm
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
print([e["profiling_name"] for e in compat.recorded_calls(nccl=False, stacks=True)])
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
    compat.forget_recorded_calls()
    print(compat.recorded_calls(nccl=False, stacks=False))
else:
    print([])
compat.isolate_groups_by_thread()
"""


def test_the_flight_recorder_and_threads_with_groups_of_their_own() -> None:
    """In a process of its own: a buffer must be asked for before torch is imported."""
    ran = subprocess.run(
        [sys.executable, "-c", RECORDING], capture_output=True, text=True,
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": "100"},
    )  # fmt: skip
    assert ran.stdout == "['gloo:all_reduce']\n[]\n", ran.stderr


@pytest.mark.parametrize("module", compat.PROCESS_WIDE)
def test_what_a_process_has_one_of_is_there(module: str) -> None:
    there = vars(importlib.import_module(module))
    assert [name for name in compat.PROCESS_WIDE[module] if name not in there] == []


def test_settings_of_a_process_are_there() -> None:
    of_torch = dir(torch._C)
    wanted = {f"_{what}_{name}" for what in ("get", "set") for name in compat.SETTINGS}
    assert sorted(wanted - set(of_torch)) == []
    assert {"_get_fp32_precision_getter", "_set_fp32_precision_setter"} <= set(of_torch)
    pairs = compat.process_settings()
    assert len(pairs) == 3 + len(compat.PRECISIONS) + len(compat.SETTINGS)
    for get, put in pairs:
        before = get()
        if before is not None:  # not set
            put(before)
        assert get() == before


def test_deterministic_algorithms_are_set_without_the_compiler() -> None:
    (_, (get, put), *_) = compat.process_settings()
    before = get()
    try:
        put((True, True))
        assert torch.are_deterministic_algorithms_enabled()
        assert get() == (True, True)
    finally:
        put(before)


def test_print_options_are_those_that_are_set() -> None:
    before = compat.print_options().precision
    try:
        torch.set_printoptions(precision=7)
        assert compat.print_options().precision == 7
    finally:
        torch.set_printoptions(precision=before)


def test_flags_change_where_code_has_disabled_it(tmp_path: Path) -> None:
    program = (
        "import torch\n"
        "from distcheck.machine import compat\n"
        "torch.backends.disable_global_flags()\n"
        "with compat.flags_may_change():\n"
        "    torch.backends.cudnn.benchmark = True\n"
        "try: torch.backends.cudnn.benchmark = False\n"
        "except RuntimeError: print('refused')\n"
    )
    ran = warm.run(program, cwd=tmp_path, program="-c")
    assert ran.stdout == "refused\n", ran.stderr


def test_devices() -> None:
    assert not compat.has_registered_device()
    assert not compat.is_cuda_lost_by_fork()
