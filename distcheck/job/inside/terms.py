"""The terms of a loss, read off its autograd graph: which losses it adds up, and the numbers that
each was multiplied by on the way to where backward starts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distcheck.machine.compat import DDP_NODE, output_of_node
from distcheck.recordings.jobs.records import Factor, Term

MOST_TERMS = 32
_MOST_NODES = 256
# What leaves a single number as it is.
_SAME = (
    "Alias", "Clone", "ReshapeAlias", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip
Node = Any
# A loss of torch's: its name, its reduction, its value, how many targets it counts.
Heard = tuple[str, str, torch.Tensor, int]
By = tuple[float, bool, bool]  # a factor: the number, and `computed` and `divides` of a Factor


@dataclass(frozen=True)
class End:
    """A node of the graph, and which of its outputs."""

    node: Node
    output: int


class _UnreadableError(Exception):
    """Why a loss has no terms."""


def terms_of(loss: torch.Tensor, heard: Sequence[Heard]) -> tuple[tuple[Term, ...], str]:
    """The terms, and why there are none: a loss that is another thing than a sum, with constant
    weights, of losses that were heard and of the script's own means and sums.
    """
    found, why = ends_of(loss, heard)
    return tuple(term for term, _ in found), why


def count_of(loss: torch.Tensor, heard: Sequence[Heard], rows: int = 0) -> tuple[float, str]:
    """What a loss is divided by, as its graph says: the elements or targets that it is a mean of,
    or the number that a sum was divided by; 0 where its terms say several numbers, or nothing. And
    how it is a sum over samples: a `sum`, or means `times` the number of samples (`rows`), or not.
    """
    found, _ = ends_of(loss, heard)
    counts = set[float]()
    times = rows if rows > 1 and found and all(_is_times(term, rows) for term, _ in found) else 1
    for term, end in found:
        if term.reduction == "sum":
            counts.add(_rounded(1 / abs(term.weight)) if term.weight else 0.0)
        else:
            several = heard[term.call][3] if term.call >= 0 else _elements(end.node)
            counts.add(several / times if several % times == 0 else 0.0)
    is_sum = len(found) == 1 and found[0][0].reduction == "sum"
    how = "times" if times > 1 else "sum" if is_sum else ""
    return (counts.pop() if len(counts) == 1 else 0.0), how


def _rounded(number: float) -> float:
    """A whole number where it is one but for the rounding of single precision."""
    near = round(number)
    return float(near) if near and abs(number - near) < 1e-3 else number


def _is_times(term: Term, rows: int) -> bool:
    """Whether a whole loss was multiplied by the number of samples."""
    return any(one.outer and not one.computed and one.number == rows for one in term.factors)


def _elements(node: Node) -> int:
    """Over how many elements each number of a mean goes."""
    of, mean = node._saved_self_sym_sizes, output_of_node(node, 0).shape
    each: int = math.prod(of) // max(1, math.prod(mean))
    return each


def gradient_of(end: End, parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    about = output_of_node(end.node, end.output)
    edge = torch.autograd.graph.GradientEdge(end.node, end.output)
    seed = torch.ones(about.shape, dtype=about.dtype)
    return torch.autograd.grad(
        [edge], list(parameters), [seed], retain_graph=True, allow_unused=True
    )


def ends_of(loss: torch.Tensor, heard: Sequence[Heard]) -> tuple[list[tuple[Term, End]], str]:
    """The terms, each with the place in the graph that it stands at."""
    try:
        return _ends(loss, heard), ""
    except _UnreadableError as error:
        return [], str(error)
    except (AttributeError, RuntimeError) as error:  # a node of another kind, or of a freed graph
        return [], f"its graph cannot be read ({error})"


def _ends(loss: torch.Tensor, heard: Sequence[Heard]) -> list[tuple[Term, End]]:
    ends = {
        value.grad_fn: number
        for number, (_, _, value, _) in enumerate(heard)
        if value.grad_fn is not None and value.numel() == 1
    }
    found: list[tuple[Term, End]] = []
    waiting: list[tuple[Node, int, tuple[Factor, ...], bool]] = [
        (loss.grad_fn, loss.output_nr, (), True)
    ]
    for _ in range(_MOST_NODES):
        if not waiting:
            return found
        node, output, factors, outer = waiting.pop()
        if node in ends:
            name, reduction, *_ = heard[ends[node]]
            term = Term(name=name, reduction=reduction, call=ends[node], factors=factors)
            found.append((term, End(node, output)))
        elif (reduction := _reduces(node)) and not _passes(node):
            own = tuple(_as_factor(factor, outer=outer) for factor in _inside(node))
            term = Term(name=f"a {reduction}", reduction=reduction, call=-1, factors=factors + own)
            found.append((term, End(node, output)))
        else:
            parts = _parts(node, output)
            outer = outer and len(parts) == 1
            for part, place, factor in reversed(parts):
                if factor is not None and factor[0] == 0:
                    continue  # it adds nothing, as where every parameter is to have a gradient
                by = () if factor is None else (_as_factor(factor, outer=outer),)
                waiting.append((part, place, (*factors, *by), outer))
        if len(found) + len(waiting) > MOST_TERMS:
            break
    raise _UnreadableError(f"it has more than {MOST_TERMS} terms")


def _as_factor(factor: By, *, outer: bool) -> Factor:
    return Factor(number=factor[0], computed=factor[1], outer=outer, divides=factor[2])


def _inside(node: Node) -> Iterator[By]:
    """What every element of a mean or sum is multiplied by."""
    part = node.next_functions[0][0]
    while part is not None and _kind(part) in ("Mul", "Div", "Neg", *_SAME):
        try:
            ((part, _, factor),) = _parts(part, 0)
        except _UnreadableError:  # multiplied by a tensor, as by a mask
            return
        if factor is not None:
            yield factor


Part = tuple[Node, int, By | None]  # a node, its output, its factor


def _parts(node: Node, output: int) -> list[Part]:
    """What a node adds up, each with the number that it is multiplied by."""
    if node is None:
        raise _UnreadableError("it has no graph")
    name = _kind(node)
    before = [(*edge,) for edge in node.next_functions]
    there = [edge for edge in before if edge[0] is not None]
    if name in ("Add", "Sub"):
        signs = (1, 1 if name == "Add" else -1)
        return [
            (*edge, _factor(sign * (node._saved_alpha if place else 1)))
            for place, (edge, sign) in enumerate(zip(before, signs, strict=False))
            if edge[0] is not None
        ]
    if name == "Neg":
        return [(*there[0], _factor(-1))]
    divisor = name == "Div" and before[0][0] is None
    if name in ("Mul", "Div") and len(there) == 1 and not divisor:
        by = node._saved_other if before[0][0] is not None else node._saved_self
        return [(*there[0], _scaled(by, divides=name == "Div"))]
    if name == DDP_NODE:
        return [(*before[output], None)]
    if name in ("Sum", "Mean") and there and _stacks(there[0][0]):
        each = [(*edge, None) for edge in there[0][0].next_functions if edge[0] is not None]
        count = len(there[0][0].next_functions)
        return [(*edge[:2], _factor(1 / count) if name == "Mean" else None) for edge in each]
    if len(there) == 1 and (name in _SAME or name in ("Sum", "Mean")):
        return [(*there[0], None)]
    raise _UnreadableError(f"it contains {node.name()}")


def _kind(node: Node) -> str:
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def _reduces(node: Node) -> str:
    """Whether a node is a mean or a sum over elements."""
    return {"Mean": "mean", "Sum": "sum"}.get("" if node is None else _kind(node), "")


def _passes(node: Node) -> bool:
    """Whether a mean or sum is one over a single number, or over losses that were stacked."""
    return bool(math.prod(node._saved_self_sym_sizes) == 1 or _stacks(node.next_functions[0][0]))


def _stacks(node: Node) -> bool:
    return node is not None and node.name().startswith("StackBackward")


def _factor(number: float) -> By | None:
    return None if number == 1 else (float(number), isinstance(number, float), False)


def _scaled(by: Any, *, divides: bool) -> By:
    """The constant of a multiplication or division, and whether a script may have computed it: by
    a division it has, unless it is a whole number that was multiplied.
    """
    if not isinstance(by, torch.Tensor) or by.numel() != 1:
        raise _UnreadableError("it is multiplied by something other than a number")
    number = float(by)
    if divides:
        number = 1 / number if number else math.nan
    if not math.isfinite(number):
        raise _UnreadableError("it is multiplied by a number that is not finite")
    return number, divides or by.is_floating_point(), divides
