"""Features of the code under test that a run must exercise before a pass shows that it is correct.

Examples are a branch on a dtype, a limit on the number of elements, and a comparison with a step
number. They are found in the source, with their lines. `verification/contents.py` reports those
that no case of a run has exercised. A spurious hint only costs a line on the screen.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed
from torch import nn

from distcheck.records.run_facts import UsedFeature
from distcheck.training.adapters.source import COLLECTIVES, Source

_MOST_STEP = 10**5  # larger numbers are not step counts
_LARGE = 2.0**24  # a larger factor may overflow
_LEAST_SIZE = 1 << 10  # smaller numbers are not limits of elements or bytes
# The feature that a name in code indicates.
_BY_NAME: Mapping[str, str] = {
    name: feature
    for feature, names in {
        "non_finite": "isfinite isnan isinf nan_to_num nan_to_num_",
        "huge": "clamp clamp_ clip clip_ clamp_max clamp_min",
        "denormal": "finfo set_flush_denormal tiny smallest_normal eps",
        "several_dtypes": "half float16 bfloat16 double float64 _flatten_dense_tensors "
        "promote_types result_type is_floating_point",
        "complex": "complex64 complex128 is_complex view_as_real view_as_complex real imag",
        "accumulation": "no_sync require_backward_grad_sync require_sync sync_enabled",
        "clipping": "clip_grad_norm_ clip_grad_value_ max_norm",
        "loss_scaling": "GradScaler unscale_ loss_scale found_inf",
        "frozen": "requires_grad requires_grad_",
        "sparse": "is_sparse coalesce sparse_coo_tensor to_dense",
        "starts_apart": "broadcast broadcast_object_list _broadcast_coalesced",
        "resume": "state_dict load_state_dict __getstate__ __setstate__",
        "eval_mode": "training eval is_grad_enabled",
        "buffers": "buffers named_buffers register_buffer",
        "tied": "data_ptr",
        "not_contiguous": "reshape contiguous flatten ravel view is_contiguous stride "
        "memory_format",
        "views": "untyped_storage storage storage_offset as_strided set_",
        "draws": "rand randn randint randperm rand_like randn_like bernoulli bernoulli_ "
        "manual_seed dropout multinomial normal_ uniform_",
        "closure": "closure",
        "narrow": "int8 uint8 int16 short int32",
        "schedule": "lr param_groups",
    }.items()
    for name in names.split()
}
_ALONE = ("closure", "GradScaler", "clip_grad_norm_", "_flatten_dense_tensors", "randperm")
_COUNTERS = ("step", "iter", "count", "call", "warm", "epoch", "round", "index", "tick", "seen")
_SIZES = ("numel", "nbytes", "element_size", "bytes", "bucket", "chunk", "cap", "elements", "size")
_WORLDS = ("world", "rank", "ranks", "size", "nodes", "get_world_size", "get_rank", "peer")
_FACTORIES = ("zeros", "empty", "ones", "full")
_OFTEN = 2  # lines kept per feature


def used_features(sources: Sequence[Source]) -> tuple[UsedFeature, ...]:
    """Return the features that these sources use; each line appears once."""
    nodes = [(source, node) for source in sources for node in source.nodes]
    look = _Look(nodes)
    found: dict[tuple[str, int], list[UsedFeature]] = {}
    for source, node in nodes:
        for feature, number in look.at(node):
            line = source.line_of(node)
            kept = found.setdefault((feature, number), [])
            if len(kept) < _OFTEN and line not in [one.line for one in kept]:
                kept.append(UsedFeature(feature=feature, line=line, number=number))
    each = (use for kept in found.values() for use in kept)
    return tuple(sorted(each, key=lambda use: (use.feature, use.line)))


def names_collectives(sources: Sequence[Source]) -> bool:
    return any(source.words & COLLECTIVES for source in sources)


def marker_attributes(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return the attributes that these sources look up and that no parameter or module of torch
    has. A training script sets them to mark the parameters that the code handles.
    """
    calls = (node for source in sources for node in source.nodes if isinstance(node, ast.Call))
    names = (
        call.args[1].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr")
        if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
        if isinstance(call.args[0], ast.Name) and call.args[0].id != "self"
    )
    known = {*dir(torch.nn.Parameter), *dir(nn.Module()), *dir(torch), *dir(torch.distributed)}
    return tuple(sorted({name for name in names if isinstance(name, str)} - known))


class _Look:
    """Finds features in nodes, given the integers assigned to names there and in their modules."""

    def __init__(self, nodes: Sequence[tuple[Source, ast.AST]]) -> None:
        self._values: dict[str, float] = {}
        for source in dict.fromkeys(source for source, _ in nodes):
            values = source.names.items()
            self._values |= {n: v for n, v in values if isinstance(v, int | float)}
        whole = {n: int(v) for n, v in self._values.items() if abs(v) < 2**60 and int(v) == v}
        self._known: dict[str, int] = whole
        for _, node in nodes:
            self._known |= dict(self._assigned_integers(node))

    def _assigned_integers(self, node: ast.AST) -> Iterator[tuple[str, int]]:
        """Yield names and attributes that are assigned integers, and parameters with defaults."""
        pairs: list[tuple[ast.AST | ast.arg, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.arguments):
            taken = [*node.posonlyargs, *node.args][-len(node.defaults) or len(node.args) :]
            pairs = [*zip(taken, node.defaults, strict=False)]
            pairs += [(a, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d]
        for target, value in pairs:
            number = self._number(value)
            if number is not None:
                yield _name_of(target), number

    def at(self, node: ast.AST) -> Iterator[tuple[str, int]]:
        """Yield the features of a node, each with its limit, or 0."""
        name = _name_of(node)
        # A variable may be called `half`.
        tells = isinstance(node, ast.Attribute) or name in _ALONE
        if tells and name in _BY_NAME:
            yield _BY_NAME[name], 0
        elif abs(self._values.get(name, 0)) >= _LARGE and not isinstance(node, ast.arg):
            yield "huge", 0
        elif isinstance(node, ast.Compare):
            yield from self._limits([node.left, *node.comparators])
        elif isinstance(node, ast.BinOp):
            yield from self._uses_of_arithmetic(node)
        elif isinstance(node, ast.keyword) and node.arg == "async_op":
            yield "async", 0
        elif isinstance(node, ast.Assign) and _keeps_those_with_gradients(node):
            yield "unfrozen", 0
        elif isinstance(node, ast.Call) and _takes_default_dtype(node):
            yield "default_dtype", 0

    def _limits(self, sides: Sequence[ast.expr]) -> Iterator[tuple[str, int]]:
        """Yield integers compared with a count of steps, or of elements or bytes."""
        words = {word for side in sides for word in _names_in(side)}
        for number in filter(None, map(self._number, sides)):
            if 0 < number < _MOST_STEP and _contains_any(words, _COUNTERS):
                yield "late", number
            if number >= _LEAST_SIZE and _contains_any(words, _SIZES):
                yield "size", number

    def _uses_of_arithmetic(self, node: ast.BinOp) -> Iterator[tuple[str, int]]:
        """Yield features of arithmetic: with ranks, which is valid for some world sizes only
        (pairs, powers of two, nodes), and with steps, for an action every n steps.
        """
        words = {*_names_in(node.left), *_names_in(node.right)}
        number = self._number(node.right)
        odd = isinstance(node.op, ast.BitXor | ast.BitAnd | ast.FloorDiv | ast.LShift | ast.RShift)
        if (odd or (isinstance(node.op, ast.Mod) and number)) and _contains_any(words, _WORLDS):
            yield "world", 0
        if isinstance(node.op, ast.Mod) and number and _contains_any(words, _COUNTERS):
            yield "late", number

    def _number(self, node: ast.AST) -> int | None:
        """Return an integer that is written out, computed such as 25 * 1024 * 1024, or assigned to
        a name; None otherwise.
        """
        if isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, bool) or not isinstance(value, int | float):
                return None
            return int(value) if abs(value) < 2**60 and int(value) == value else None
        if isinstance(node, ast.BinOp) and type(node.op) in _FOLDED:
            left, right = self._number(node.left), self._number(node.right)
            if left is not None and right is not None and min(left, right) >= 0:
                return _FOLDED[type(node.op)](left, right)
            return None
        return self._known.get(_name_of(node))


def _keeps_those_with_gradients(node: ast.Assign) -> bool:
    """Return True if an attribute is assigned the parameters that have a gradient at that time."""
    kept = any(isinstance(target, ast.Attribute) for target in node.targets)
    chosen = isinstance(node.value, ast.ListComp | ast.SetComp | ast.DictComp)
    return kept and chosen and "grad" in _names_in(node.value)


def _takes_default_dtype(call: ast.Call) -> bool:
    """Return True if it creates a tensor in torch's default dtype, regardless of the gradients'."""
    function = call.func
    is_torchs = isinstance(function, ast.Attribute) and _name_of(function.value) == "torch"
    named = {keyword.arg for keyword in call.keywords}
    return is_torchs and _name_of(function) in _FACTORIES and not named & {"dtype", "out", None}


def _name_of(node: ast.AST) -> str:
    for field in ("attr", "id", "arg"):
        if isinstance(node, ast.Attribute | ast.Name | ast.arg) and hasattr(node, field):
            return str(getattr(node, field))
    return ""


def _contains_any(words: set[str], parts: Sequence[str]) -> bool:
    return any(part in word.lower() for word in words for part in parts)


def _names_in(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value
        elif name := _name_of(inner):
            yield name


_FOLDED: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Mult: lambda a, b: a * b,
    ast.LShift: lambda a, b: a << b if b < 64 else 0,
    ast.Pow: lambda a, b: a**b if b < 64 and a < 1024 else 0,
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
}
