"""Values to try for an argument whose name has no known meaning: an object of the class that the
code requires, or plain values.

An argument gets an object only if the code identifies its class: by the annotation, or by
attributes that only one class of the code's module has. Plain values are hypotheses, which
`hypotheses` tries. The world size is tried only for a name that can mean a number of ranks, unless
documentation describes it differently. Otherwise, code that forgets to divide would pass if its
loss scale happened to be the world size. No other number is tried for it: with 1, code that divides
by twice its argument would pass in a world of 2.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from distcheck.training.adapters.source import Source
from distcheck.training.adapters.target import annotation_text, author_methods
from distcheck.training.adapters.unknown import suggested_value

_LIBRARIES = {"torch", "numpy", "mpi4py", *sys.stdlib_module_names}
_DIVISORS = {
    "denom", "denominator", "divisor", "div", "divide", "n", "num", "count", "total", "normalizer",
}  # fmt: skip
_NO_DIVISORS = re.compile(
    r"loss|(?<!re)scal(e|ing)|micro|mini|batch|accum|token|sample|step|epoch|clip|bucket|chunk"
)


def class_for_argument(parameter: inspect.Parameter, function: Callable[..., Any]) -> type | None:
    """Return the author's class from which an argument is to be created: the class in its
    annotation, or the only class of the module that has every attribute which the function reads.
    """
    source = Source(function)
    words = re.findall(r"[A-Za-z_]\w*", annotation_text(parameter))
    named = [source.names[word] for word in words if word in source.names]
    read = source.attributes_of(parameter.name)
    fitting = (one for one in list(source.names.values()) if inspect.isclass(one)) if read else ()
    found = list(filter(_is_authors, named)) or [
        one for one in dict.fromkeys(fitting) if _is_authors(one) and read <= _members(one)
    ]
    return found[0] if len(set(found)) == 1 and found[0] is not function else None


def _is_authors(kind: Any) -> bool:
    if not inspect.isclass(kind) or inspect.isabstract(kind) or "<locals>" in kind.__qualname__:
        return False
    bases = [base for base in kind.__mro__ if base is not object]
    of_a_library = kind.__module__.partition(".")[0] in _LIBRARIES
    special = any(base.__name__ in ("Enum", "Protocol", "Optimizer") for base in bases)
    return not (of_a_library or special or issubclass(kind, nn.Module | BaseException))


def _members(kind: type) -> set[str]:
    own = (
        Source(getattr(kind, n)).attributes_of("self", assigned=True) for n in author_methods(kind)
    )
    return set(dir(kind)).union(*own)


def argument_for_class(kind: type) -> str:
    """Return the `--arg` value that creates an object of a class; empty without a file."""
    try:
        file = inspect.getsourcefile(kind) or ""
    except TypeError:
        return ""
    inside = file.startswith(os.getcwd() + os.sep)
    return f"@{os.path.relpath(file) if inside else file}:{kind.__qualname__}" if file else ""


def candidate_values(parameter: inspect.Parameter, function: Callable[..., Any]) -> list[str]:
    """Return the values to try for an argument, in the format of `--arg`."""
    text, name = annotation_text(parameter), parameter.name
    divides = ["@world_size"] if _may_divide(name, function) else []
    first = [value] if (value := suggested_value(name, function)) else []
    if "bool" in text or Source(function).only_tests(name):
        return ["True", "False"]
    if re.search("int|float|str", text):
        others = []
    elif re.search("dict|Dict|Mapping", text) or name in ("defaults", "kwargs", "options"):
        others = ["{}"]
    elif "Group" in text:
        others = ["@group"]
    else:
        others = ["None", "@group", "@optimizer", "@model"]
    return list(dict.fromkeys([*first, *divides, *others]))


def _may_divide(name: str, function: Callable[..., Any]) -> bool:
    """Return True if an argument may be the number of ranks: by its name, unless the name or the
    documentation calls it something else.
    """
    name, documented = name.lower(), (inspect.getdoc(function) or "").lower()
    # With the lines that go on after its own, up to the next argument's.
    about = re.findall(
        rf"^.*\b{re.escape(name)}\b.*(?:\n(?!\s*[\w`*]+ ?[:(-]).+)*", documented, re.M
    )
    if any(map(_NO_DIVISORS.search, [name, *about])):
        return False
    return bool(set(name.split("_")) & _DIVISORS)
