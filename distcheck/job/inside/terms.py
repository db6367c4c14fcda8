"""Reads the terms of a loss from its autograd graph: the losses that it adds up, and the factor of
each.

In anomaly mode every node of the graph has the traceback of its operation. An addition is then
found in the source by its line, if that line has only one outermost addition, and its operands are
the source text of the terms.
"""

import ast
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from distcheck.machine.compat import DDP_NODE, output_of_node
from distcheck.recordings.jobs.records import LossFactor, LossTerm
from distcheck.worlds.callers import is_tested_code

MOST_TERMS = 32
_MOST_NODES = 256
# Operations that keep a scalar's value.
_SAME = (
    "Alias", "Clone", "ReshapeAlias", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip
Node = Any
# A torch loss: its name, reduction, place in the graph, and number of targets. A tensor is no
# place, since `loss += aux` gives it another node.
Heard = tuple[str, str, torch.autograd.graph.GradientEdge, int]
By = tuple[float, bool, bool]  # a factor: its number, and `computed` and `divides` of Factor


@dataclass(frozen=True)
class NodeOutput:
    """A node of the graph and the index of its output, and its weight in the loss; in anomaly mode
    also the source text of the term, if known, and its line FILE:LINE.
    """

    node: Node
    output: int
    weight: float = 1.0
    text: str = ""
    place: str = ""


class _UnreadableError(Exception):
    """Raised with the reason why the terms of a loss cannot be read."""


def terms_of(loss: torch.Tensor, heard: Sequence[Heard]) -> tuple[tuple[LossTerm, ...], str]:
    """Return the terms of a loss, or the reason why there are none: the loss is not a sum, with
    constant weights, of recorded losses and of the script's own means and sums.
    """
    found, why = ends_of(loss, heard)
    return tuple(term for term, _ in found), why


def divisor_of_loss(loss: torch.Tensor, heard: Sequence[Heard], rows: int = 0) -> tuple[float, str]:
    """Return the divisor of a loss, and how the loss is a sum over samples.

    The divisor is the number of elements or targets of a mean, or the number by which a sum is
    divided; 0 if the terms disagree or have none. The second value is "sum", "times" (a mean times
    the number of samples, `rows`), or "".
    """
    found, _ = ends_of(loss, heard)
    counts = set[float]()
    times = rows if rows > 1 and found and all(_is_times(term, rows) for term, _ in found) else 1
    for term, end in found:
        if term.reduction == "sum":
            counts.add(_round_if_integer(1 / abs(term.weight)) if term.weight else 0.0)
        else:
            several = heard[term.call][3] if term.call >= 0 else _elements(end.node)
            counts.add(several / times if several % times == 0 else 0.0)
    is_sum = len(found) == 1 and found[0][0].reduction == "sum"
    how = "times" if times > 1 else "sum" if is_sum else ""
    return (counts.pop() if len(counts) == 1 else 0.0), how


def _round_if_integer(number: float) -> float:
    """Round to an integer if the difference is within float32 rounding."""
    near = round(number)
    return float(near) if near and abs(number - near) < 1e-3 else number


def _is_times(term: LossTerm, rows: int) -> bool:
    """Return True if the whole loss was multiplied by the number of samples."""
    return any(one.outer and not one.computed and one.number == rows for one in term.factors)


def _elements(node: Node) -> int:
    """Return the number of elements that each output of a mean averages."""
    of, mean = node._saved_self_sym_sizes, output_of_node(node, 0).shape
    each: int = math.prod(of) // max(1, math.prod(mean))
    return each


def is_scalar(edge: torch.autograd.graph.GradientEdge) -> bool:
    return bool(math.prod(output_of_node(edge.node, edge.output_nr).shape) == 1)


def gradients_of_term(
    end: NodeOutput, parameters: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    about = output_of_node(end.node, end.output)
    edge = torch.autograd.graph.GradientEdge(end.node, end.output)
    seed = torch.ones(about.shape, dtype=about.dtype)
    return torch.autograd.grad(
        [edge], list(parameters), [seed], retain_graph=True, allow_unused=True
    )


def ends_of(
    loss: torch.Tensor, heard: Sequence[Heard]
) -> tuple[list[tuple[LossTerm, NodeOutput]], str]:
    """Return the terms with their places in the graph, or the reason why there are none."""
    try:
        return _terms_in_graph(loss, heard), ""
    except _UnreadableError as error:
        return [], str(error)
    except (AttributeError, RuntimeError) as error:  # an unknown or freed node
        return [], f"its graph cannot be read ({error})"


def _terms_in_graph(
    loss: torch.Tensor, heard: Sequence[Heard]
) -> list[tuple[LossTerm, NodeOutput]]:
    ends = {edge.node: n for n, (_, _, edge, _) in enumerate(heard) if is_scalar(edge)}
    found: list[tuple[LossTerm, NodeOutput]] = []
    waiting: list[tuple[Node, int, tuple[LossFactor, ...], bool, _Source]] = [
        (loss.grad_fn, loss.output_nr, (), True, _Source())
    ]
    lines = set[str]()  # with an addition that is known
    for _ in range(_MOST_NODES):
        if not waiting:
            return found
        node, output, factors, outer, source = waiting.pop()
        if node in ends:
            name, reduction, *_ = heard[ends[node]]
            term = LossTerm(name=name, reduction=reduction, call=ends[node], factors=factors)
            found.append((term, source.end(node, output, factors)))
        elif (reduction := _reduces(node)) and not _passes(node):
            own = tuple(_to_factor(factor, outer=outer) for factor in _inside(node))
            term = LossTerm(
                name=f"a {reduction}", reduction=reduction, call=-1, factors=factors + own
            )
            found.append((term, source.end(node, output, factors)))
        else:
            parts = _summands(node, output)
            outer = outer and len(parts) == 1
            sources = _sources(node, parts, source, lines)
            for (part, place, factor), text in reversed([*zip(parts, sources, strict=True)]):
                if factor is not None and factor[0] == 0:
                    continue  # adds nothing; used to give every parameter a gradient
                by = () if factor is None else (_to_factor(factor, outer=outer),)
                waiting.append((part, place, (*factors, *by), outer, text))
        if len(found) + len(waiting) > MOST_TERMS:
            break
    raise _UnreadableError(f"it has more than {MOST_TERMS} terms")


def _to_factor(factor: By, *, outer: bool) -> LossFactor:
    return LossFactor(number=factor[0], computed=factor[1], outer=outer, divides=factor[2])


def _inside(node: Node) -> Iterator[By]:
    """Yield the factors of each element of a mean or sum."""
    part = node.next_functions[0][0]
    while part is not None and _kind(part) in ("Mul", "Div", "Neg", *_SAME):
        try:
            ((part, _, factor),) = _summands(part, 0)
        except _UnreadableError:  # multiplied by a tensor, such as a mask
            return
        if factor is not None:
            yield factor


Part = tuple[Node, int, By | None]  # a node, its output, its factor


def _summands(node: Node, output: int) -> list[Part]:
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
        return [(*there[0], _constant_factor(by, divides=name == "Div"))]
    if name == DDP_NODE:
        return [(*before[output], None)]
    if name in ("Sum", "Mean") and there and _stacks(there[0][0]):
        each = [(*edge, None) for edge in there[0][0].next_functions if edge[0] is not None]
        count = len(there[0][0].next_functions)
        return [(*edge[:2], _factor(1 / count) if name == "Mean" else None) for edge in each]
    if len(there) == 1 and (name in _SAME or name in ("Sum", "Mean")):
        return [(*there[0], None)]
    raise _UnreadableError(f"it contains {node.name()}")


@dataclass(frozen=True)
class _Source:
    """The expression that a node of the graph computes, and the line of the addition it is in."""

    expression: ast.expr | None = None
    place: str = ""

    def end(self, node: Node, output: int, factors: Sequence[LossFactor]) -> NodeOutput:
        text = "" if self.expression is None else ast.unparse(self.expression)
        weight = math.prod(factor.number for factor in factors)
        place = self.place or _place_of(node)
        own = os.path.relpath(place) if place else ""
        return NodeOutput(node, output, weight, text, place if own.startswith("..") else own)


def _sources(node: Node, parts: Sequence[Part], source: _Source, lines: set[str]) -> list[_Source]:
    """Return the source of each summand of a node. `lines` are those of known additions."""
    if _kind(node) not in ("Add", "Sub"):
        return [source if len(parts) == 1 else _Source()] * len(parts)
    place = source.place
    operands = _operands(source.expression)
    if not operands:
        place = _place_of(node)
        operands = () if place in lines else _only_addition(place)
        lines.add(place)
    kept = [edge[0] is not None for edge in node.next_functions]
    if len(operands) != len(kept):
        return [_Source(place=place)] * len(parts)
    return [_Source(one, place) for one, is_part in zip(operands, kept, strict=True) if is_part]


Operands = tuple[()] | tuple[ast.expr | None, ast.expr]


def _operands(one: ast.AST | None) -> Operands:
    """Return the operands of an addition or subtraction; of `a += b` only the second."""
    if not isinstance(one, ast.BinOp | ast.AugAssign) or not isinstance(one.op, ast.Add | ast.Sub):
        return ()
    return (one.left, one.right) if isinstance(one, ast.BinOp) else (None, one.value)


def _only_addition(place: str) -> Operands:
    """Return the operands of the only outermost addition on a line FILE:LINE, or nothing."""
    file, _, line = place.rpartition(":")
    nodes = ast.walk(_tree(file))
    found = [one for one in nodes if _operands(one) and str(getattr(one, "lineno", 0)) == line]
    inner = {id(part) for one in found for part in ast.walk(one) if part is not one}
    outer = [one for one in found if id(one) not in inner]
    return _operands(outer[0]) if len(outer) == 1 else ()


@cache
def _tree(file: str) -> ast.AST:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _place_of(node: Node) -> str:
    """Return the innermost line of the script that made a node, FILE:LINE; "" if unknown."""
    for frame in reversed(node.metadata.get("traceback_", ())):
        found = re.match(r'\s*File "(.+)", line (\d+)', frame)
        if found and is_tested_code(found[1]) and os.sep in found[1]:
            return f"{found[1]}:{found[2]}"
    return ""


def _kind(node: Node) -> str:
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def _reduces(node: Node) -> str:
    """Return "mean" or "sum" for a reduction node, else ""."""
    return {"Mean": "mean", "Sum": "sum"}.get("" if node is None else _kind(node), "")


def _passes(node: Node) -> bool:
    """Return True for a mean or sum over a single element, or over stacked losses."""
    return bool(math.prod(node._saved_self_sym_sizes) == 1 or _stacks(node.next_functions[0][0]))


def _stacks(node: Node) -> bool:
    return node is not None and node.name().startswith("StackBackward")


def _factor(number: float) -> By | None:
    return None if number == 1 else (float(number), isinstance(number, float), False)


def _constant_factor(by: Any, *, divides: bool) -> By:
    """Return a constant factor, with a flag that is True if the script may have computed it
    (quotients and floats).
    """
    if not isinstance(by, torch.Tensor) or by.numel() != 1:
        raise _UnreadableError("it is multiplied by something other than a number")
    number = float(by)
    if divides:
        number = 1 / number if number else math.nan
    if not math.isfinite(number):
        raise _UnreadableError("it is multiplied by a number that is not finite")
    return number, divides or by.is_floating_point(), divides
