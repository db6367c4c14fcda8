"""Static analysis of source code: the names in it, and how a variable is used."""

import ast
import dis
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from types import CodeType, ModuleType
from typing import Any

from distcheck.training.adapters.names import meaning_of

_OF_A_MODULE = {
    "parameters", "named_parameters", "modules", "named_modules", "children", "state_dict",
    "register_full_backward_hook", "register_full_backward_pre_hook", "register_forward_hook",
    "register_forward_pre_hook", "register_comm_hook",
}  # fmt: skip
# Methods that only an mpi4py communicator has. Those of torch.distributed contain an underscore,
# and names that both have (gather, send) are ambiguous.
_OF_A_COMMUNICATOR = {
    "Allreduce", "Iallreduce", "Reduce", "Bcast", "Ibcast", "Gather", "Allgather", "Scatter",
    "Reduce_scatter", "Alltoall", "Send", "Isend", "Recv", "Irecv", "Sendrecv", "Barrier",
    "Get_rank", "Get_size", "allreduce", "bcast", "sendrecv",
}  # fmt: skip
_OF_TORCH_DISTRIBUTED = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "broadcast",
    "reduce_scatter_tensor", "all_to_all", "get_rank", "get_world_size", "is_initialized",
}  # fmt: skip
# The calls by which code communicates tensors.
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter", "broadcast",
    "reduce_scatter_tensor", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "gather",
    "scatter", "send", "recv", "isend", "irecv", "batch_isend_irecv", "all_gather_object",
} | (_OF_A_COMMUNICATOR - {"Get_rank", "Get_size", "Barrier"})  # fmt: skip
# Calls with which an owner sends updated parameters to the other ranks.
SENDS_PARAMETERS = {
    "broadcast", "all_gather", "all_gather_into_tensor", "broadcast_coalesced", "send", "isend",
}  # fmt: skip

_ADDING = {"append", "extend", "add", "update", "insert", "setdefault"}
_YIELD = ("list", "tuple", "enumerate", "zip", "reversed", "sorted", "iter", "tqdm")
# Those of them whose first argument is one tensor.
_TAKE_ONE = {
    "all_reduce", "reduce", "broadcast", "send", "isend", "Allreduce", "allreduce", "Bcast",
}  # fmt: skip


def unwrap_function(value: Any) -> Any:
    """Return the function inside a partial, or the only one in a decorator's closure."""
    while True:
        if isinstance(value, functools.partial):
            value = value.func
        elif (inner := decorated_function(value)) is not None:
            value = inner
        else:
            return value


def decorated_function(value: Any) -> Any:
    """Return the function that a decorator without functools.wraps hides; None if there is none."""
    if not inspect.isfunction(value) or hasattr(value, "__wrapped__") or value.__closure__ is None:
        return None
    code = value.__code__
    takes_all = code.co_flags & inspect.CO_VARARGS and code.co_flags & inspect.CO_VARKEYWORDS
    if not takes_all or code.co_argcount or code.co_kwonlyargcount:
        return None
    held = [cell.cell_contents for cell in value.__closure__ if _is_filled(cell)]
    functions = [one for one in held if inspect.isfunction(one)]
    return functions[0] if len(functions) == 1 else None


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def called_function(value: Any) -> Any:
    """Return the function that a call runs: the function of a partial, or an object's __call__."""
    value = unwrap_function(value)
    is_named = inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)
    return value if is_named or not callable(value) else type(value).__call__


class _Nodes(tuple[ast.AST, ...]):
    """The nodes of a tree, with cached properties that every form reads; see `Source`."""

    @cached_property
    def attributes(self) -> set[str]:
        named = {node.attr for node in self if isinstance(node, ast.Attribute)}
        # Includes getattr(p, name) with a name from a constant.
        texts = {node.value for node in self if isinstance(node, ast.Constant)}
        return named | ({"grad", "data"} & {text for text in texts if isinstance(text, str)})

    @cached_property
    def words(self) -> set[str]:
        return self.attributes | {node.id for node in self if isinstance(node, ast.Name)}

    @cached_property
    def called(self) -> set[str]:
        return {ast.unparse(node.func) for node in self if isinstance(node, ast.Call)}

    @cached_property
    def descends(self) -> bool:
        return any(_subtracts(node) for node in self)


_seen: dict[int, tuple[Any, _Nodes]] = {}  # by id, because a user's objects may be unhashable
_of_code: dict[tuple[str, CodeType], _Nodes] = {}  # ranks that share a process load it again


def _nodes_of(function: Any) -> _Nodes:
    """Return all nodes of a function's syntax tree, cached because every form reads them."""
    code = getattr(inspect.unwrap(function), "__code__", None)  # the code that getsource() shows
    if isinstance(code, CodeType):
        place = (code.co_filename, code)
        if place not in _of_code:
            _of_code[place] = _parse(function)
        return _of_code[place]
    if id(function) not in _seen:
        _seen[id(function)] = function, _parse(function)
    return _seen[id(function)][1]


def _parse(function: Any) -> _Nodes:
    return _Nodes(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))


class Source:
    """A function's syntax tree; empty if its source is unavailable."""

    def __init__(self, value: Any) -> None:
        self._value = called_function(value)
        try:
            self._nodes = _nodes_of(self._value)
        except (OSError, TypeError, SyntaxError):
            self._nodes = _Nodes()

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        return self._nodes

    @property
    def names(self) -> Mapping[str, Any]:
        value = inspect.unwrap(self._value) if callable(self._value) else self._value
        value = getattr(value, "__func__", value)
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        names: Mapping[str, Any] = getattr(value, "__globals__", None) or vars(module or object)
        return names

    def line_of(self, node: ast.AST) -> int:
        try:
            first = inspect.findsource(inspect.unwrap(self._value))[1]
        except (OSError, TypeError):
            first = 0
        return first + int(getattr(node, "lineno", 1))

    @property
    def attributes(self) -> set[str]:
        """Return every `.name` in the function."""
        return self._nodes.attributes

    def attributes_of(self, name: str, *, assigned: bool = False) -> set[str]:
        """Return every `.attr` of a variable; with `assigned`, only assigned attributes."""
        return {
            node.attr
            for node in self._nodes
            if isinstance(node, ast.Attribute)
            and _is_name(node.value, name)
            and (isinstance(node.ctx, ast.Store) or not assigned)
        }

    def changed_attributes(self, name: str) -> set[str]:
        """Return every `.attr` of a variable that is assigned or extended."""
        parts = [one.split(".") for one in self.called if one.count(".") == 2]
        added = {attribute for of, attribute, method in parts if of == name and method in _ADDING}
        return added | self.attributes_of(name, assigned=True)

    def kind_by_use(self, name: str) -> str:
        """Return the kind of a variable judged by its use, regardless of its name: a `model`, an
        `optimizer`, its `groups` of parameters, a `communicator` of mpi4py, a `group`, or the
        `distributed` module; empty if ambiguous.
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
        elements = {element for node in self._nodes for element in _elements_of(node, name)}
        parts = {ast.unparse(node) for node in self._nodes if isinstance(node, ast.Subscript)}
        if any(f"{element}['params']" in parts for element in elements):
            return "groups"
        passed = (node for node in self._nodes if isinstance(node, ast.keyword))
        return "group" * any(node.arg == "group" and _is_name(node.value, name) for node in passed)

    @property
    def exchanges_by_mpi(self) -> bool:
        """Return True if the function calls a communication method that only mpi4py has."""
        return bool(self.attributes & (_OF_A_COMMUNICATOR - {"Get_rank", "Get_size", "Barrier"}))

    def kind_by_elements(self, name: str) -> str:
        """Return the kind of a variable, judged by the use of the variable or of its elements.

        `parameters` and `models` follow from attributes of the elements, `gradients` from elements
        that are passed to a collective, and `tensor` from a variable that is passed to one. Empty
        if ambiguous.
        """
        elements = {name_ for node in self._nodes for name_ in _elements_of(node, name)}
        used = set[str]().union(*map(self.attributes_of, elements))
        if used & {"parameters", "named_parameters"}:
            return "models"
        if "grad" in used:
            return "parameters"
        sent = set(_sent_by(self._nodes))
        return "tensor" if name in sent else "gradients" if sent & elements else ""

    def meaning_of(self, name: str) -> str:
        """Return the meaning of a variable. Its use takes precedence over its name, unless the name
        is more specific about a model or an optimizer.
        """
        use, named = self.kind_by_use(name), meaning_of(name)
        return named if use in ("model", "optimizer", "groups") and named else use or named

    @property
    def called(self) -> set[str]:
        """Return every function that the function calls, as written."""
        return self._nodes.called

    @property
    def steps_optimizer(self) -> bool:
        held = [n for n in self.attributes_of("self") if meaning_of(n) == "optimizer"]
        return any(f"self.{name}.step" in self.called for name in held)

    @property
    def returns_many(self) -> bool:
        """Return True if the function returns a list, tuple or dict that it creates."""
        return self._returns((ast.List, ast.ListComp, ast.Tuple, ast.Dict, ast.DictComp))

    @property
    def returns_what_it_calls(self) -> bool:
        return self._returns((ast.Call,))

    @property
    def returns_something(self) -> bool:
        return self._returns((ast.expr,))

    def _returns(self, kinds: tuple[type[Any], ...]) -> bool:
        """Return True if it returns an expression of these kinds, directly or by name."""
        names = {
            place.id
            for node in self._nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, kinds)
            for place in node.targets
            if isinstance(place, ast.Name)
        }
        returned = [node.value for node in self._nodes if isinstance(node, ast.Return)]
        return any(
            isinstance(value, kinds) or (isinstance(value, ast.Name) and value.id in names)
            for value in returned
        )

    def unpacks_pairs(self, name: str) -> bool:
        """Return True if the function unpacks elements of a variable: `for name, p in pairs`."""
        loops = (node for node in self._nodes if isinstance(node, ast.For | ast.comprehension))
        pairs = (n for n in loops if isinstance(n.target, ast.Tuple) and len(n.target.elts) == 2)
        return any(_is_name(node.iter, name) for node in pairs)

    def indexes(self, name: str) -> bool:
        """Return True if the function uses a variable as a list: x[0], len(x), reversed(x)."""
        used = [node.value for node in self._nodes if isinstance(node, ast.Subscript)]
        for node in self._nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("len", "reversed"):
                used += node.args
        return any(_is_name(value, name) for value in used)

    def only_tests(self, name: str) -> bool:
        """Return True if the function uses a variable only as a condition."""
        tests = [n.test for n in self._nodes if isinstance(n, ast.If | ast.IfExp | ast.While)]
        found = [n for test in tests for n in _conditions(test) if _is_name(n, name)]
        return bool(found) and len(found) == sum(_is_name(node, name) for node in self._nodes)

    @property
    def words(self) -> set[str]:
        """Return every name in the function, of any kind."""
        return self._nodes.words

    @property
    def descends(self) -> bool:
        """Return True if the function subtracts from a parameter's `.data` (`-=`, `sub_`)."""
        return self._nodes.descends

    @property
    def registers_hooks(self) -> bool:
        return any(name.startswith("register_") and "hook" in name for name in self.attributes)


def _conditions(test: ast.expr) -> Iterator[ast.expr]:
    """Yield the operands of `not`, `and` and `or` in a condition; a condition without them."""
    parts = test.values if isinstance(test, ast.BoolOp) else []
    parts = [test.operand] if isinstance(test, ast.UnaryOp) else parts
    yield from (one for part in parts for one in _conditions(part)) if parts else [test]


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _elements_of(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the loop variables over `name`, list(name), enumerate(name), zip(name, ...)."""
    if not isinstance(node, ast.For | ast.comprehension):
        return
    gone_through = node.iter
    handed = [gone_through]
    if isinstance(gone_through, ast.Call) and getattr(gone_through.func, "id", "") in _YIELD:
        handed = gone_through.args
    if any(_is_name(one, name) for one in handed):
        yield from (n.id for n in ast.walk(node.target) if isinstance(n, ast.Name))


def _sent_by(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the variables that are the first argument of a collective, directly or as `.data`."""
    for node in nodes:
        function = node.func if isinstance(node, ast.Call) else None
        called = getattr(function, "attr", getattr(function, "id", ""))
        if called in _TAKE_ONE and isinstance(node, ast.Call) and node.args:
            sent = node.args[0]
            sent = sent.value if isinstance(sent, ast.Attribute) and sent.attr == "data" else sent
            yield from [sent.id] if isinstance(sent, ast.Name) else []


def _subtracts(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Sub) and _is_data(node.target)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
        return isinstance(node.value.op, ast.Sub) and any(map(_is_data, node.targets))
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr == "sub_" and _is_data(called.value)


def _is_data(node: ast.AST) -> bool:
    """Return True for `x.data`, except for `x.grad.data`."""
    if not isinstance(node, ast.Attribute) or node.attr != "data":
        return False
    return not (isinstance(node.value, ast.Attribute) and node.value.attr == "grad")


_READS, _BINDS = ("LOAD_GLOBAL", "LOAD_NAME"), ("STORE_GLOBAL", "DELETE_GLOBAL")


class ReachedCode:
    """The code that runs when one of a module's functions or classes is called: its sources, and
    the global names that it reads and binds.
    """

    def __init__(self, value: Any, module: ModuleType) -> None:
        known = vars(module)
        self.read: set[str] = set()
        self.written: set[str] = set()
        self.sources: list[Source] = []
        seen: set[int] = set()
        waiting = [value]
        while waiting:
            reached = waiting.pop()
            self.sources.append(Source(reached))
            bases = reached.__bases__ if inspect.isclass(reached) else ()
            waiting += [base for base in bases if base.__module__ == module.__name__]
            for code in _code_objects(reached, known):
                if id(code) in seen:
                    continue
                seen.add(id(code))
                globals_read, globals_written = _globals_of(code)
                self.read |= globals_read
                self.written |= globals_written
                called = [known[name] for name in code.co_names if name in known]
                waiting += [v for v in called if getattr(v, "__module__", None) == module.__name__]


@lru_cache(maxsize=1024)  # ranks that share a process load the same code again
def _globals_of(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the global names that code reads, and those that it binds or deletes."""
    done = [(one.opname, one.argval) for one in dis.get_instructions(code)]
    read = frozenset(name for operation, name in done if operation in _READS)
    return read, frozenset(name for operation, name in done if operation in _BINDS)


def assigned_globals(function: Callable[..., Any]) -> frozenset[str]:
    return _globals_of(function.__code__)[1]


def _code_objects(value: Any, known: dict[str, Any]) -> Iterator[CodeType]:
    """Yield the code objects of a function and its nested functions, or of a class's methods; only
    those whose globals are `known`.
    """
    value = inspect.unwrap(value) if callable(value) else value
    functions: list[Callable[..., Any]] = [getattr(value, "__func__", value)]
    if inspect.isclass(value):
        members = vars(value).values()
        functions = [getattr(m, "__func__", getattr(m, "fget", m)) for m in members]
    unwrap_function = [inspect.unwrap(f) for f in functions if callable(f)]
    waiting = [f.__code__ for f in unwrap_function if getattr(f, "__globals__", None) is known]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
