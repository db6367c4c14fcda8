"""What the source of code tells without a call: what is done with a variable, what is named."""

import ast
import functools
import inspect
import textwrap
from functools import cached_property
from types import CodeType
from typing import Any

from distcheck.training.adapters import names

_OF_A_MODULE = {
    "parameters", "named_parameters", "modules", "named_modules", "children", "state_dict",
    "register_full_backward_hook", "register_full_backward_pre_hook", "register_forward_hook",
    "register_forward_pre_hook", "register_comm_hook",
}  # fmt: skip
# Methods of a communicator of mpi4py that nothing else has. Those of torch.distributed have an
# underscore in their names, and those that both have (gather, send) tell nothing.
_OF_A_COMMUNICATOR = {
    "Allreduce", "Iallreduce", "Reduce", "Bcast", "Ibcast", "Gather", "Allgather", "Scatter",
    "Reduce_scatter", "Alltoall", "Send", "Isend", "Recv", "Irecv", "Sendrecv", "Barrier",
    "Get_rank", "Get_size", "allreduce", "bcast", "sendrecv",
}  # fmt: skip
_OF_TORCH_DISTRIBUTED = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "broadcast",
    "reduce_scatter_tensor", "all_to_all", "get_rank", "get_world_size", "is_initialized",
}  # fmt: skip


def unwrapped(value: Any) -> Any:
    """What a partial calls."""
    while isinstance(value, functools.partial):
        value = value.func
    return value


def function_of(value: Any) -> Any:
    """What is run when it is called: the function of a partial, or the __call__ of an object."""
    value = unwrapped(value)
    is_named = inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)
    return value if is_named or not callable(value) else type(value).__call__


class _Nodes(tuple[ast.AST, ...]):
    """The nodes of a tree, with what is asked of them for every form."""

    @cached_property
    def attributes(self) -> set[str]:
        """Every `.name` in it."""
        return {node.attr for node in self if isinstance(node, ast.Attribute)}

    @cached_property
    def words(self) -> set[str]:
        """Every name in it, of whatever kind."""
        return self.attributes | {node.id for node in self if isinstance(node, ast.Name)}

    @cached_property
    def descends(self) -> bool:
        """See `Source`."""
        return any(_subtracts(node) for node in self)


_seen: dict[int, tuple[Any, _Nodes]] = {}  # by id, since objects of a user's may not be hashable
_of_code: dict[tuple[str, CodeType], _Nodes] = {}  # which ranks that share a process load again


def _nodes_of(function: Any) -> _Nodes:
    """Every node of a function's syntax tree: each form looks at it, and each part of a form."""
    code = getattr(inspect.unwrap(function), "__code__", None)  # of what getsource() shows
    if isinstance(code, CodeType):
        place = (code.co_filename, code)
        if place not in _of_code:
            _of_code[place] = _parsed(function)
        return _of_code[place]
    if id(function) not in _seen:
        _seen[id(function)] = function, _parsed(function)
    return _seen[id(function)][1]


def _parsed(function: Any) -> _Nodes:
    return _Nodes(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))


class Source:
    """A function's syntax tree; empty where its source cannot be had."""

    def __init__(self, value: Any) -> None:
        try:
            self._nodes = _nodes_of(function_of(value))
        except (OSError, TypeError, SyntaxError):
            self._nodes = _Nodes()

    @property
    def attributes(self) -> set[str]:
        """Every `.name` in it."""
        return self._nodes.attributes

    def attributes_of(self, name: str) -> set[str]:
        """Every `.attr` of a variable."""
        return {
            node.attr
            for node in self._nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == name
        }

    def sets_of(self, name: str) -> set[str]:
        """Every `.attr` of a variable that is assigned to."""
        return {
            node.attr
            for node in self._nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == name
        }

    def use_of(self, name: str) -> str:
        """What a variable is by what is done with it, whatever it is called: a `model`, an
        `optimizer`, a `communicator` of mpi4py, a `group`, or the `distributed` module; empty where
        its use does not tell.
        """
        used = self.attributes_of(name)
        for attributes, use in (
            (_OF_A_MODULE, "model"),
            ({"param_groups"}, "optimizer"),
            (_OF_A_COMMUNICATOR, "communicator"),
            (_OF_TORCH_DISTRIBUTED, "distributed"),
        ):
            if used & attributes:
                return use
        return "group" if self._is_group(name) else ""

    @property
    def exchanges_by_mpi(self) -> bool:
        """Whether it calls a method by which mpi4py alone exchanges something."""
        return bool(self.attributes & (_OF_A_COMMUNICATOR - {"Get_rank", "Get_size", "Barrier"}))

    def meaning_of(self, name: str) -> str:
        """The meaning of a variable: its use outweighs its name, except that a name may say more
        of what is worked on.
        """
        use, named = self.use_of(name), names.MEANINGS.get(name, "")
        return named if use in ("model", "optimizer") and named else use or named

    def _is_group(self, name: str) -> bool:
        """Whether it hands a variable on as `group=`."""
        return any(
            isinstance(node, ast.keyword)
            and node.arg == "group"
            and isinstance(node.value, ast.Name)
            and node.value.id == name
            for node in self._nodes
        )

    def calls(self, name: str, attribute: str, method: str) -> bool:
        """Whether it calls `name.attribute.method()`."""
        return any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == method
            and isinstance(node.func.value, ast.Attribute)
            and node.func.value.attr == attribute
            and isinstance(node.func.value.value, ast.Name)
            and node.func.value.value.id == name
            for node in self._nodes
        )

    @property
    def returns_many(self) -> bool:
        """Whether it returns a list, tuple or dict that it makes."""
        made = (ast.List, ast.ListComp, ast.Tuple, ast.Dict, ast.DictComp)
        nodes = self._nodes
        returned = [node.value for node in nodes if isinstance(node, ast.Return)]
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        filled = {
            place.id
            for node in assigned
            for place in node.targets
            if isinstance(place, ast.Name) and isinstance(node.value, made)
        }
        return any(
            isinstance(value, made) or (isinstance(value, ast.Name) and value.id in filled)
            for value in returned
        )

    @property
    def returns_what_it_calls(self) -> bool:
        """Whether it returns what a call made, by itself or under a name."""
        nodes = self._nodes
        made = {
            place.id
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for place in node.targets
            if isinstance(place, ast.Name)
        }
        returned = [node.value for node in nodes if isinstance(node, ast.Return)]
        return any(
            isinstance(value, ast.Call) or (isinstance(value, ast.Name) and value.id in made)
            for value in returned
        )

    def indexes(self, name: str) -> bool:
        """Whether it does with a variable what lists can and generators cannot: x[0], len(x),
        reversed(x).
        """
        for node in self._nodes:
            used: list[ast.AST] = [node.value] if isinstance(node, ast.Subscript) else []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                used = list(node.args) if node.func.id in ("len", "reversed") else []
            if any(isinstance(u, ast.Name) and u.id == name for u in used):
                return True
        return False

    @property
    def words(self) -> set[str]:
        """Every name in it, of whatever kind."""
        return self._nodes.words

    @property
    def descends(self) -> bool:
        """Whether it subtracts something from a `.data` that is not a gradient's: p.data -= ...,
        p.data.sub_(...), p.data = p.data - ...
        """
        return self._nodes.descends

    @property
    def registers_hooks(self) -> bool:
        """Whether it registers hooks on something."""
        return any(name.startswith("register_") and "hook" in name for name in self.attributes)


def _subtracts(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Sub) and _is_data(node.target)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
        return isinstance(node.value.op, ast.Sub) and any(map(_is_data, node.targets))
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr == "sub_" and _is_data(called.value)


def _is_data(node: ast.AST) -> bool:
    """Whether it is `x.data`, of something else than `x.grad`."""
    if not isinstance(node, ast.Attribute) or node.attr != "data":
        return False
    return not (isinstance(node.value, ast.Attribute) and node.value.attr == "grad")
