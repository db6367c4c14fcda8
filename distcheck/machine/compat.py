"""Private names of torch without a public equivalent. Update this file when a torch release renames
one.

Classes are read when this module is imported, and everything else when it is used, so a renamed
function breaks only the code that uses it. `tests/unit/test_compat.py` uses every name with the
installed torch.
"""

import functools
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed.distributed_c10d as c10d
import torch.utils._python_dispatch as dispatch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # base class of all BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase  # also of InstanceNorm
from torch.nn.modules.conv import _ConvNd as Conv
from torch.nn.modules.conv import _ConvTransposeNd as ConvTranspose
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils.fetch import _IterableDatasetFetcher as IterableFetcher
from torch.utils.data._utils.fetch import _MapDatasetFetcher as MapFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "BatchNorm", "Conv", "ConvTranspose", "IterableFetcher", "LoaderIterator", "MapFetcher",
    "NormBase", "TorchDispatchMode", "tree_leaves",
]  # fmt: skip


class Replaceable(NamedTuple):
    """A function of torch that distcheck replaces, in the place where torch's own code
    looks it up.
    """

    owner: Any
    name: str

    def replace(self, make: Callable[[Any], Any]) -> None:
        setattr(self.owner, self.name, make(getattr(self.owner, self.name)))


MAKE_GROUP = Replaceable(c10d, "_new_process_group_helper")
START_CUDA = Replaceable(torch.cuda, "_lazy_init")
COLLECT_FUTURES = Replaceable(torch._C, "_collect_all")
START_DEVICE_THREADS = Replaceable(torch._C, "_ensureCUDADeviceGuardSet")
CHECK_SYNC_BATCHNORM = Replaceable(
    nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle"
)
PLACES = (
    MAKE_GROUP, START_CUDA, COLLECT_FUTURES, START_DEVICE_THREADS, CHECK_SYNC_BATCHNORM,
)  # fmt: skip

# -- modules, tensors and their hooks ----------------------------------------------------------

OF_MODULES = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_OPTIMIZERS = ("_optimizer_step_pre_hooks",)
OF_ALL_OPTIMIZERS = "_global_optimizer_pre_hooks"
COMPILED = "_orig_mod"  # the module that torch.compile wrapped
# Prefixes that wrappers of torch add to parameter names.
WRAPPERS = ("module", COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Marks of FSDP1: on the flat tensors that hold parameters, and on the parameters in them.
OF_FSDP1 = ("_is_flat_param", "_fsdp_flattened")


def is_compiled(module: nn.Module) -> bool:
    """Return True if a call of the module runs code compiled by torch.compile or
    `Module.compile()`.
    """
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or COMPILED in getattr(module, "_modules", ())


class OpMode(TorchDispatchMode):
    """A dispatch mode under which torch.compile still compiles. (Under other modes, it runs
    eagerly.)
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code is called with this mode active."""
        return True


def written_arguments(operator: Any) -> dict[str, str]:
    """Return the arguments of an operator in order, each with the way it is written: `out` if it is
    only an output, `self` if it may also be read, empty if it is not written.
    """
    schema = getattr(operator, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return {
        one.name: ("out" if one.is_out or one.kwarg_only else "self")
        if one.alias_info is not None and one.alias_info.is_write
        else ""
        for one in arguments
    }


def draws_random_numbers(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the version counter of a tensor; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def fsdp2_dtypes(module: nn.Module) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the compute dtype and the gradient reduction dtype of a module's fully_shard policy. A
    dtype that the policy does not set is None.
    """
    state = getattr(module, "_get_fsdp_state", None)
    policy = None if state is None else getattr(state(), "_mp_policy", None)
    return getattr(policy, "param_dtype", None), getattr(policy, "reduce_dtype", None)


def fsdp2_parameters(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield each parameter that fully_shard shards for a module, and its unsharded version. The
    unsharded version is None before the first forward pass.
    """
    for one in _fsdp2_records(module):
        yield one.sharded_param, getattr(one, "_unsharded_param", None)


def fsdp2_holding(module: nn.Module) -> Iterator[tuple[torch.Tensor, Callable[[], bool]]]:
    """Yield the parameters of `fsdp2_parameters`, each with a function that returns True if
    gradients of the unsharded version were accumulated and will be reduced later.
    """
    for one in _fsdp2_records(module):
        yield one.sharded_param, functools.partial(_holds_gradient, one)


def _holds_gradient(record: Any) -> bool:
    return getattr(record, "unsharded_accumulated_grad", None) is not None


def _fsdp2_records(module: nn.Module) -> Iterator[Any]:
    state = getattr(module, "_get_fsdp_state", None)
    of_state = None if state is None else state()
    group = getattr(of_state, "_fsdp_param_group", None)
    groups = getattr(of_state, "_fsdp_param_groups", None) or ([] if group is None else [group])
    for one in groups:
        yield from one.fsdp_params


def shard_offset(tensor: Any) -> tuple[int, ...]:
    """Return the offset of this rank's shard in a DTensor, one number per dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    given = tensor.shape, tensor.device_mesh, tensor.placements
    return tuple(compute_local_shape_and_global_offset(*given)[1])


def root_mesh(mesh: Any) -> Any:
    return mesh._get_root_mesh()


def pipeline_stage() -> type:
    """Return the base class of pipeline stages, whether written by hand or traced."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    return _PipelineStageBase


def hooks_of(owner: nn.Module | torch.Tensor) -> set[tuple[str, int]]:
    """Return the hooks on a module or a tensor as (kind, key) pairs."""
    kinds = OF_MODULES if isinstance(owner, nn.Module) else OF_TENSORS
    return {(kind, key) for kind in kinds for key in getattr(owner, kind, None) or ()}


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if hooks run before an optimizer's step: hooks of this optimizer, if its class
    supports them, or of all optimizers.
    """
    of_all = getattr(sys.modules["torch.optim.optimizer"], OF_ALL_OPTIMIZERS)
    return bool(of_all) or any(getattr(optimizer, kind, None) for kind in OF_OPTIMIZERS)


def copy_each(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    torch._foreach_copy_(to, values)


def ddp_times(model: Any) -> Mapping[str, Any]:
    """Return the time measurements of DistributedDataParallel; empty if there is no model."""
    if model is None:
        return {}
    measured: Mapping[str, Any] = model._get_ddp_logging_data()
    return measured


def ddp_hooks(model: Any) -> Sequence[Any]:
    """Return the communication hooks that a script registered on DistributedDataParallel."""
    return tuple(model._comm_hooks)


def wrap_index_iterator(iterator: Any, noting: Callable[[Any], Any]) -> None:
    """Replace the iterator of indices in a DataLoader iterator by `noting(iterator)`."""
    iterator._sampler_iter = noting(iterator._sampler_iter)


# -- autograd ----------------------------------------------------------------------------------

# Entry points of torch's Python code to C++ code that waits for collectives: file, function ("":
# all).
MAY_WAIT = (
    ("torch/autograd/graph.py", "_engine_run_backward"),
    ("torch/nn/parallel/distributed.py", ""),
    ("torch/distributed/utils.py", ""),
    ("torch/distributed/_functional_collectives.py", ""),
    ("torch/_ops.py", ""),
)
# Functions in these files that wait for futures of calls made within them.
WAIT_FOR_FUTURES = (
    "_engine_run_backward", "_match_all_reduce_for_bwd_pass", "_sync_module_buffers",
)  # fmt: skip
DDP_NODE = "_DDPSink"  # autograd node through which DistributedDataParallel returns outputs
BaseFuture: Any = torch.futures.Future.__bases__[0]  # the C++ class, without Python's additions


def is_in_backward() -> bool:
    """Return True if this thread is running an autograd node of a backward pass."""
    of_torch: Any = torch._C
    return of_torch._current_autograd_node() is not None


def after_backward(callback: Callable[[], Any]) -> None:
    """Register `callback` for the end of the backward pass that is currently running."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def output_of_node(node: Any, output: int) -> Any:
    """Return the shape and dtype of an output of an autograd node."""
    return node._input_metadata[output]  # inputs of the node in a backward pass


# -- dispatch modes and operations -------------------------------------------------------------


def dispatch_modes() -> list[Any]:
    """Return the active dispatch modes of this thread, the innermost last."""
    return dispatch._get_current_dispatch_mode_stack()


def push_mode(mode: Any) -> None:
    dispatch._push_mode(mode)


def pop_mode() -> None:
    dispatch._pop_mode()


def without_modes() -> Any:
    """Return a context in which no dispatch mode observes the operations of this thread."""
    of_torch: Any = torch._C
    return of_torch._DisableTorchDispatch()


def schema_of(operation: Any) -> Any:
    """Return the schema of an operation: its arguments, and which of them the operation writes."""
    return operation._schema


# -- process groups ----------------------------------------------------------------------------


def groups() -> dict[Any, Any]:
    by_group: dict[Any, Any] = c10d._world.pg_map
    return by_group


def count_of_created_groups() -> int:
    """Return the number of process groups that torch has created. torch names the next group by
    this number.
    """
    return int(c10d._world.group_count)


def groups_state() -> Any:
    """Return the object in which torch stores the process groups of this process."""
    return c10d._world


def fresh_groups_state() -> dict[str, Any]:
    return vars(c10d._World())


def default_store() -> Any:
    return c10d._get_default_store()


def weak_storage(tensor: torch.Tensor) -> Any:
    """Return a weak reference to the storage of a tensor. References to the same storage are equal.
    A reference keeps no memory alive, and while it exists, no other storage equals it. Raises if
    the tensor has no storage.
    """
    return StorageWeakRef(tensor.untyped_storage())


def counts_calls() -> bool:
    return hasattr(c10d.ProcessGroup, "_get_sequence_number_for_group")


def calls_counted(group: Any) -> int:
    """Return the number of calls of a process group. Raises RuntimeError if torch does not count
    them.
    """
    return int(group._get_sequence_number_for_group())


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of a group's calls on the CPU. Raises if the group's backend has no
    timeout.
    """
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


def functional_collectives() -> int:
    """Return the number of functional collectives whose work nothing has waited for yet."""
    return int(_c10d_module()._get_work_registry_size())


def isolate_groups_by_thread() -> None:
    """Give each thread its own registry of process groups. C++ code looks up groups by name in this
    registry.
    """
    _c10d_module()._set_thread_isolation_mode(True)


def recorded_calls(*, nccl: bool, stacks: bool) -> list[dict[str, Any]]:
    """Return the collectives of this process in torch's flight recorder, or in NCCL's recorder,
    oldest first.
    """
    dump = "_dump_nccl_trace" if nccl else "_dump_fr_trace"
    with _block_inductor():
        dumped = getattr(_c10d_module(), dump)(includeCollectives=True, includeStackTraces=stacks)
        entries: list[dict[str, Any]] = pickle.loads(dumped).get("entries", [])
    return entries


def forget_recorded_calls() -> None:
    """Clear the flight recorder. Raises AttributeError before torch 2.15."""
    _c10d_module()._reset_fr_trace()


@contextmanager
def _block_inductor() -> Iterator[None]:
    """Prevent the flight recorder from importing torch._inductor, which it asks about stack frames.
    If the code has not imported torch._inductor, no frame belongs to it.

    Measured: with this import, the report of a rank with stacks takes 1.4 s of CPU time; without
    it, less than 1 ms. A rank reports while it hangs, so this time delays the end of the run.
    """
    if "torch._inductor" in sys.modules:
        yield
        return
    torch.__dict__["_inductor"] = SimpleNamespace()
    try:
        yield
    finally:
        torch.__dict__.pop("_inductor", None)


def _c10d_module() -> Any:
    of_torch: Any = torch._C
    return of_torch._distributed_c10d


# -- state of the process ----------------------------------------------------------------------

# Names in modules.
PROCESS_WIDE: Mapping[str, Sequence[str]] = {
    "torch.distributed.distributed_c10d": (
        "_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_group_count",
        "_tags_to_pg", "_pg_to_tag", "_default_pg_init_method",
    ),
    "torch.nn.modules.module": (
        "_global_backward_hooks", "_global_backward_pre_hooks", "_global_buffer_registration_hooks",
        "_global_forward_hooks", "_global_forward_hooks_always_called",
        "_global_forward_hooks_with_kwargs", "_global_forward_pre_hooks",
        "_global_is_full_backward_hook", "_global_module_registration_hooks",
        "_global_parameter_registration_hooks",
    ),
    "torch.optim.optimizer": ("_global_optimizer_post_hooks", "_global_optimizer_pre_hooks"),
    "torch.utils.checkpoint": ("_enable_checkpoint_early_stop",),
}  # fmt: skip
# Pairs of _get_NAME and _set_NAME.
SETTINGS = (
    "cudnn_allow_tf32", "cudnn_benchmark", "cudnn_deterministic", "cudnn_enabled",
    "deterministic_fill_uninitialized_memory", "float32_matmul_precision", "mkldnn_deterministic",
    "mkldnn_enabled", "nnpack_enabled", "onednn_allow_tf32", "warnAlways",
)  # fmt: skip
PRECISIONS = (
    ("generic", "all"), ("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)  # fmt: skip
Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # (getter, setter)


def process_settings() -> list[Setting]:
    """Return the settings that torch stores in C++, except those that the installed torch lacks."""
    of_torch: Any = torch._C
    pairs: list[Setting] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            # torch.use_deterministic_algorithms also imports torch's compiler. Measured: 1 s.
            lambda both: of_torch._set_deterministic_algorithms(both[0], warn_only=both[1]),
        ),
        (
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda both: torch.set_anomaly_enabled(*both),
        ),
    ]
    if hasattr(of_torch, "_get_fp32_precision_getter"):
        for place in PRECISIONS:
            get = functools.partial(of_torch._get_fp32_precision_getter, *place)
            put = functools.partial(of_torch._set_fp32_precision_setter, *place)
            pairs.append((get, put))
    for name in SETTINGS:
        pair = getattr(of_torch, f"_get_{name}", None), getattr(of_torch, f"_set_{name}", None)
        if pair[0] is not None and pair[1] is not None:
            pairs.append((pair[0], pair[1]))
    return pairs


def print_options() -> Any:
    """Return the object that torch.set_printoptions changes."""
    of_tensors: Any = sys.modules["torch._tensor_str"]
    return of_tensors.PRINT_OPTS


def flags_may_change() -> Any:
    """Return a context in which flags of torch.backends may be set, even if torch has disabled
    that.
    """
    context: Any = getattr(torch.backends, "__allow_nonbracketed_mutation")
    return context()


def has_registered_device() -> bool:
    of_torch: Any = torch._C
    return hasattr(torch, of_torch._get_privateuse1_backend_name())


def is_cuda_lost_by_fork() -> bool:
    """Return True if this process was forked from one that had initialized CUDA."""
    of_cuda: Any = torch.cuda
    return bool(of_cuda._is_in_bad_fork())
