"""Settings that a process has one of each, in Python and in torch: each rank of a simulated world
has its own.

Of a name in a module that all ranks share, and of an object, every rank has another value: lists
and dictionaries are copied for each. torch keeps its settings in C++, where they are set only if
the rank that runs now has others than the one before.
"""

import copy
import functools
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

# Names in modules; those that a release of Python or torch does not have are left out.
_NAMES: Mapping[str, Sequence[str]] = {
    "builtins": ("print", "input", "open", "__import__"),
    "logging": (
        "lastResort", "raiseExceptions", "_loggerClass", "_logRecordFactory",
        "_warnings_showwarning",
    ),
    "sys": (
        "argv", "path", "path_hooks", "meta_path", "excepthook", "displayhook", "stdin",
    ),
    "tempfile": ("tempdir",),
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
    "warnings": ("filters", "onceregistry", "defaultaction", "showwarning", "formatwarning"),
}  # fmt: skip
# torch's pairs of _get_NAME and _set_NAME.
_OF_TORCH = (
    "cudnn_allow_tf32", "cudnn_benchmark", "cudnn_deterministic", "cudnn_enabled",
    "deterministic_fill_uninitialized_memory", "float32_matmul_precision", "mkldnn_deterministic",
    "mkldnn_enabled", "nnpack_enabled", "onednn_allow_tf32", "warnAlways",
)  # fmt: skip
_PRECISIONS = (
    ("generic", "all"), ("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)  # fmt: skip
Pair = tuple[Callable[[], Any], Callable[[Any], Any]]


class ProcessSettings:
    """Those of this process. What a rank has of its own is of no meaning elsewhere."""

    def __init__(self) -> None:
        self._modules = []
        for module, names in _NAMES.items():
            there = vars(sys.modules[module]) if module in sys.modules else {}
            if known := [name for name in names if name in there]:
                self._modules.append((there, known, operator.itemgetter(*known, known[0])))
        printing: Any = torch._tensor_str.PRINT_OPTS  # type: ignore[attr-defined]
        self._objects: list[Any] = [c10d._world, logging.root, logging.root.manager, printing]
        self._of_torch = _pairs_of_torch()
        self._now = self._torch_now()

    def beginning(self) -> Any:
        """The settings as they are now, for a rank to begin with."""
        names = [[_own(module[name]) for name in names] for module, names, _ in self._modules]
        others = [{n: _own(v) for n, v in vars(one).items()} for one in self._objects[1:]]
        return names, [vars(c10d._World()), *others], self._torch_now()

    def take(self) -> Any:
        """Those of the rank that ran."""
        self._now = self._torch_now()
        values = [_values(module, names, get) for module, names, get in self._modules]
        return values, [one.__dict__ for one in self._objects], self._now

    def give(self, own: Any) -> None:
        """Sets those of the rank that runs now. Those of the last one have been taken."""
        values, objects, of_torch = own
        before = warnings.filters
        for (module, names, _), these in zip(self._modules, values, strict=True):
            module.update(zip(names, these, strict=False))
        for one, state in zip(self._objects, objects, strict=True):
            one.__dict__ = state
        if before != warnings.filters and (changed := getattr(warnings, "_filters_mutated", None)):
            changed()  # without it, what a place has warned of once stays silent
        if of_torch != self._now:
            for (_, put), value, is_now in zip(self._of_torch, of_torch, self._now, strict=True):
                if value is not None and value != is_now:
                    put(value)

    def _torch_now(self) -> list[Any]:
        try:
            return [get() for get, _ in self._of_torch]
        except RuntimeError:  # code has set torch's two interfaces for one thing apart
            return [_or_nothing(get) for get, _ in self._of_torch]


def _values(
    module: Mapping[str, Any], names: Sequence[str], get: Callable[[Any], tuple[Any, ...]]
) -> Sequence[Any]:
    try:
        return get(module)
    except KeyError:  # code has deleted one
        return [module.get(name) for name in names]


def _or_nothing(get: Callable[[], Any]) -> Any:
    with suppress(RuntimeError):
        return get()
    return None


def _own(value: Any) -> Any:
    """A value for one rank: containers are copied."""
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _pairs_of_torch() -> list[Pair]:
    of_torch: Any = torch._C
    found: list[Pair] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (
            lambda: (
                of_torch._get_deterministic_algorithms(),
                of_torch._get_deterministic_algorithms_warn_only(),
            ),
            lambda both: of_torch._set_deterministic_algorithms(both[0], warn_only=both[1]),
        ),
        (
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda both: torch.set_anomaly_enabled(*both),
        ),
    ]
    if hasattr(of_torch, "_get_fp32_precision_getter"):
        for place in _PRECISIONS:
            get = functools.partial(of_torch._get_fp32_precision_getter, *place)
            put = functools.partial(of_torch._set_fp32_precision_setter, *place)
            found.append((get, put))
    for name in _OF_TORCH:
        own_get, own_put = (getattr(of_torch, f"_{what}_{name}", None) for what in ("get", "set"))
        if own_get is not None and own_put is not None:
            found.append((own_get, own_put))
    return found
