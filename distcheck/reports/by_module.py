"""The modules of a model in a report: a sentence for the screen, a tree for the page."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from distcheck.records.run_facts import ByModule

_DEEPEST = 32  # levels of a tree; deeper modules keep their full name
_MARKS = {"wrong": "fail", "follows": "unknown", "near": "pass", "same": "pass", "unseen": "unseen"}
_SAID = {
    "wrong": "inputs match, outputs do not",
    "follows": "differs because its inputs or incoming gradients differ",
    "near": "matches within rounding",
    "same": "bit-identical",
    "unseen": "not compared",
}


class Node(NamedTuple):
    """A module in the tree, with its submodules; `opened` if one of all these is wrong."""

    name: str
    tone: str
    said: str
    kind: str
    opened: bool
    within: "list[Node]"


def of_modules(found: ByModule) -> str:
    """Return the sentence on the first wrong module, and on modules that were not recorded."""
    said = [found.first]
    if found.compiled:
        names = ", ".join(name or "the model" for name in found.compiled[:3])
        more = f" and {len(found.compiled) - 3} more" if len(found.compiled) > 3 else ""
        said.append(
            f"modules inside {names}{more} were not recorded, because torch.compile compiled them"
        )
    if found.left_out:
        said.append(f"{found.left_out} further module calls of a step were not recorded")
    return "; ".join(said)


def tree(modules: Sequence[Any]) -> list[Node]:
    """Return the module tree of a document's entry, by dotted names."""
    return _nodes("", {one["name"]: one for one in modules}, [one["name"] for one in modules])


def _nodes(above: str, by_name: dict[str, Any], names: Sequence[str], depth: int = 0) -> list[Node]:
    """Return the nodes directly below a name, given all `names` below it."""
    start = f"{above}." if above else ""
    found: dict[str, list[str]] = {}
    for name in names:
        rest = name.removeprefix(start)
        part = rest.partition(".")[0] if depth < _DEEPEST else rest
        found.setdefault(part, []).append(name)
    nodes = []
    for part, inner in sorted(found.items(), key=lambda item: item[0] != ""):
        full = f"{start}{part}"
        below = [name for name in inner if name != full]
        within = _nodes(full, by_name, below, depth + 1) if part else []
        one = by_name.get(full)
        tone = "unseen" if one is None else _MARKS[one["state"]]
        nodes.append(
            Node(
                name=part or "the model",
                tone=tone,
                said="" if one is None else _describe(one),
                kind="" if one is None else one["kind"],
                opened=tone == "fail" or any(node.opened for node in within),
                within=within,
            )
        )
    return nodes


def _describe(one: Any) -> str:
    said = _SAID[one["state"]]
    times = f", {one['calls']} calls" if one["calls"] > 1 else ""
    far = f", {one['error']:.1e} of {one['bound']:.1e}" if one["error"] else ""
    return f"{said}{far}{times}"
