"""Finds lines of the code under test that read state which differs between processes.

The lines come from the syntax tree of the strategy's file and the modules next to it; nothing is
imported. The source does not show which line is responsible, so all candidates are listed. In the
strategy's file, these are lines that its definition reaches by name. Candidates depend on the
factor that made a difference:

    interpreters, memory   iterates over a set; hash(), id(), data_ptr()
    nodes                  LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, get_node_local_rank()
    environment            iterates over os.environ

If two worlds with the same process state differed, the list has sets, hashes, addresses, clocks,
process ids and the system's random numbers.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec

from distcheck.judge.rerun_bisection import BisectionResult
from distcheck.plan.source_files import python_sources_of
from distcheck.records import CallSite
from distcheck.records.decoding import parse_source

_MOST_BYTES = 1 << 20  # bytes of a file that is read
_MOST_LINES, _MOST_TEXT = 4, 80  # lines shown, and characters of each
_SETS = ("set", "frozenset")
_OF_SETS = ("union", "intersection", "difference", "symmetric_difference", "copy")
# Calls that take an iterable and keep its order, or sum in it.
_IN_ORDER = (
    "list", "tuple", "enumerate", "iter", "zip", "map", "filter", "sum", "reversed", "fromkeys",
    "join", "stack", "cat", "chain", "extend",
)  # fmt: skip
_NODES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")
_ADDRESSES = ("data_ptr", "_cdata")
_CHANGING = (
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "now",
    "getpid", "urandom", "uuid1", "uuid4", "token_bytes", "SystemRandom",
)  # fmt: skip
_BY_CHANCE = "chance"
_FACTORS_OF = {
    "iterates over a set": ("interpreters", "memory", _BY_CHANCE),
    "calls hash()": ("interpreters", "memory", _BY_CHANCE),
    "reads a memory address": ("interpreters", "memory", _BY_CHANCE),
    "reads a clock, a process ID or random bytes": (_BY_CHANCE,),
    "reads the node or local rank": ("nodes",),
    "iterates over the environment": ("environment",),
}


class ProcessStateLine(msgspec.Struct, frozen=True):
    """A line that reads process state; `what` describes the read."""

    file: str
    line: int
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.what}: {self.text}"


def shown_state_lines(file: str, line: int, found: BisectionResult) -> tuple[str, ...]:
    """Return at most four lines, as text, of the strategy's code that read the state which made the
    difference. `line` is the line of the strategy's definition; 0 if unknown.
    """
    wanted = set(found.factors if found.depends else (_BY_CHANCE,))
    lines = [
        one
        for one in process_state_lines(Path(file), line)
        if wanted.intersection(_FACTORS_OF[one.what])
    ]
    more = len(lines) - _MOST_LINES
    return (*map(str, lines[:_MOST_LINES]), *([f"and {more} more"] if more > 0 else []))


def process_state_lines(path: Path, line: int = 0) -> list[ProcessStateLine]:
    """Return all lines that read process state in a file and the modules next to it, the file's
    lines first. Of the file, only lines that the definition at `line` reaches, if it is known.
    Return an empty list if the file cannot be read.
    """
    try:
        contents = {name: file.data for name, file in python_sources_of(path).items()}
    except OSError:
        return []
    places = dict.fromkeys(contents, 0) | dict.fromkeys([*contents][:1], line)
    return [
        found for name, content in contents.items() for found in _lines(name, content, places[name])
    ]


def with_source_text(site: CallSite | None, strategy_file: str) -> CallSite | None:
    """Return a call site with the text of its line. The file must be the strategy's file or a
    module next to it, because a rank sent the name; no other file is read.
    """
    if site is None or not site.file or not site.line:
        return site
    place = Path(site.file).resolve()
    try:
        files = python_sources_of(Path(strategy_file)).values() if strategy_file else ()
    except OSError:
        return site
    content = next((file.data for file in files if file.path.resolve() == place), None)
    if content is None or len(content) > _MOST_BYTES:
        return site
    text = shown_line(content.decode(errors="replace").splitlines(), site.line)
    return msgspec.structs.replace(site, code=text)


def _lines(name: str, content: bytes, line: int) -> list[ProcessStateLine]:
    if len(content) > _MOST_BYTES or not name.endswith(".py"):
        return []
    try:
        tree = parse_source(content)
        finder = _Finder(tree, _leads_to(tree, line))
    except (SyntaxError, RecursionError):
        return []
    text = content.decode(errors="replace").splitlines()
    found = dict.fromkeys(sorted(finder.found))
    return [
        ProcessStateLine(name, number, what, shown_line(text, number)) for number, what in found
    ]


def _leads_to(tree: ast.Module, line: int) -> list[ast.stmt]:
    """Return the statements of a module that are reachable from the definition at `line`: itself,
    those of the names mentioned in it, transitively, and those that run on import. All, if there is
    none.
    """
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = {node.name: node for node in tree.body if isinstance(node, kinds)}
    ahead: list[ast.stmt] = [
        node
        for node in defined.values()
        if min([node.lineno, *(d.lineno for d in node.decorator_list)]) <= line
        and line <= (node.end_lineno or 0)
    ]
    if not ahead:
        return tree.body
    ahead += [node for node in tree.body if not isinstance(node, (*kinds, ast.Import))]
    found: list[ast.stmt] = []
    while ahead:
        statement = ahead.pop()
        found.append(statement)
        for name in filter(None, map(_name_of, ast.walk(statement))):
            if name in defined and defined[name] not in found and defined[name] not in ahead:
                ahead.append(defined[name])
    return found


def shown_line(text: list[str], line: int) -> str:
    """Return a line of a user's file, printable and shortened for a terminal."""
    raw = text[line - 1].strip() if line <= len(text) else ""
    safe = "".join(c if c.isprintable() else repr(c)[1:-1] for c in raw)
    return safe if len(safe) <= _MOST_TEXT else f"{safe[: _MOST_TEXT - 3]}..."


class _Finder:
    """Searches statements of a file. A name or attribute holds a set if one is assigned to it
    anywhere in the file.
    """

    def __init__(self, tree: ast.Module, statements: list[ast.stmt]) -> None:
        self.found: list[tuple[int, str]] = []
        self._sets: set[str] = set()
        nodes = list(ast.walk(tree))
        for _ in range(2):  # b = a, with a assigned further down
            self._sets.update([name for node in nodes for name in self._assigned_sets(node)])
        for statement in statements:
            for node in ast.walk(statement):
                self._look_at(node)

    def _assigned_sets(self, node: ast.AST) -> Iterator[str]:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            return
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if self._is_set(node.value):
            yield from filter(None, map(_name_of, targets))

    def _is_set(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Set | ast.SetComp):
            return True
        if isinstance(node, ast.BinOp):
            return self._is_set(node.left) or self._is_set(node.right)
        if isinstance(node, ast.IfExp):
            return self._is_set(node.body) or self._is_set(node.orelse)
        if isinstance(node, ast.Call):
            called = _name_of(node.func)
            if isinstance(node.func, ast.Attribute):
                return called in _OF_SETS and self._is_set(node.func.value)
            return called in _SETS
        return _name_of(node) in self._sets

    def _look_at(self, node: ast.AST) -> None:
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._iterates(node.iter)
        elif isinstance(node, ast.Starred):
            self._iterates(node.value)
        elif isinstance(node, ast.Call):
            self._visit_call(node)
        elif isinstance(node, ast.Constant) and node.value in _NODES:
            self._note(node, "reads the node or local rank")
        elif isinstance(node, ast.Attribute) and node.attr in _ADDRESSES:
            self._note(node, "reads a memory address")

    def _visit_call(self, node: ast.Call) -> None:
        name = _name_of(node.func)
        plain = isinstance(node.func, ast.Name)
        if plain and name == "hash":
            self._note(node, "calls hash()")
        elif plain and name == "id":
            self._note(node, "reads a memory address")
        elif name == "get_node_local_rank":
            self._note(node, "reads the node or local rank")
        elif name in _CHANGING:
            self._note(node, "reads a clock, a process ID or random bytes")
        elif name in _IN_ORDER:
            for argument in node.args:
                self._iterates(argument)
        elif name == "pop" and isinstance(node.func, ast.Attribute) and not node.args:
            self._iterates(node.func.value)
        for keyword in node.keywords:
            if keyword.arg == "key" and _name_of(keyword.value) in ("id", "hash"):
                called = _name_of(keyword.value) == "hash"
                self._note(keyword.value, "calls hash()" if called else "reads a memory address")

    def _iterates(self, node: ast.expr) -> None:
        if self._is_set(node):
            self._note(node, "iterates over a set")
        elif _is_environment(node):
            self._note(node, "iterates over the environment")

    def _note(self, node: ast.expr, what: str) -> None:
        self.found.append((node.lineno, what))


def _name_of(node: ast.AST) -> str:
    """Return the name of a variable, or the last one of an attribute; "" otherwise."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _is_environment(node: ast.expr) -> bool:
    """Return True for `os.environ`, or its items(), keys() or values()."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("items", "keys", "values") and _is_environment(node.func.value)
    return _name_of(node) in ("environ", "environb")
