"""What checks summed up for pictures, as the JSON carries it: short, and of bounded size."""

import math
from typing import Any

from distcheck.records import CheckResult
from distcheck.records.picture_sums import NONFINITE, Aggregates, Losses
from distcheck.reports.document import (
    DigestsEntry,
    ElementEntry,
    HistogramEntry,
    LossesEntry,
    MapEntry,
    made_from,
)

MOST_ROWS, MOST_COLUMNS = 64, 128  # of a map; beyond, several tensors or steps share a cell
_MOST_POINTS = 256  # of a series over steps
# Other checks of bits have a map only where something differs: nothing is to be seen else.
_ALWAYS_MAPPED = ("gradients", "parameters", "agreement")


def as_entries(result: CheckResult) -> dict[str, Any]:
    """The optional entries of a check, by key; those that have nothing to say are left out."""
    sums = result.aggregates
    keys: dict[str, Any] = {}
    if sums.shares and _shows_something(result):
        keys["map"] = _map(sums)
    if sums.ulps and (result.check == "gradients" or set(sums.ulps) != {0}):
        keys["ulp"] = _histogram(sums)
    if sums.elements:
        keys["elements"] = [made_from(ElementEntry, one) for one in sums.elements]
    if sums.losses:
        keys["loss"] = _losses(sums)
    if sums.digests:
        keys["digests"] = _digests(sums)
    return keys


def _shows_something(result: CheckResult) -> bool:
    sums = result.aggregates
    if result.check in _ALWAYS_MAPPED:
        return True
    wrong = any(float(share) > 1 for row in sums.shares.values() for share in row.values())
    return wrong and result.check not in ("data", "loss")


def _map(sums: Aggregates) -> MapEntry:
    names = list(sums.shares)
    steps = sorted({step for row in sums.shares.values() for step in row})
    tall, wide = -(-len(names) // MOST_ROWS), -(-len(steps) // MOST_COLUMNS)
    rows, labels = [], []
    for first in range(0, len(names), tall):
        together = names[first : first + tall]
        labels.append(together[0] + (f" and {len(together) - 1} more" if together[1:] else ""))
        cells = []
        for at in range(0, len(steps), wide):
            found = [
                float(sums.shares[name][step])
                for name in together
                for step in steps[at : at + wide]
                if step in sums.shares[name]
            ]
            cells.append(max(found, default=None))
        rows.append(_row(cells, in_bits=sums.in_bits))
    return MapEntry(
        kind="bits" if sums.in_bits else "bound",
        parameters=labels,
        steps=steps[::wide],
        rows=rows,
        parameters_per_row=tall,
        steps_per_column=wide,
    )


def _row(cells: list[float | None], *, in_bits: bool) -> str:
    if in_bits:
        return "".join("." if cell is None else "x" if cell else "=" for cell in cells)
    return " ".join("-" if cell is None else f"{cell:.3g}" for cell in cells)


def _histogram(sums: Aggregates) -> HistogramEntry:
    bins = {b: count for b, count in sorted(sums.ulps.items()) if b != NONFINITE}
    return HistogramEntry(
        bins={str(b): count for b, count in bins.items()}, nonfinite=sums.ulps.get(NONFINITE, 0)
    )


def _losses(sums: Aggregates) -> LossesEntry:
    """Of very many steps, the one of every stretch whose mean is furthest off."""
    every = sorted(sums.losses)
    stretch = -(-len(every) // _MOST_POINTS)
    steps = [
        max(every[at : at + stretch], key=lambda step: _off(sums.losses[step]))
        for at in range(0, len(every), stretch)
    ]
    points = [sums.losses[step] for step in steps]
    return LossesEntry(
        steps=steps,
        ranks=[list(of_rank) for of_rank in zip(*(p.ranks for p in points), strict=True)],
        mean=[p.mean for p in points],
        expected=[p.expected for p in points],
        bound=[p.bound for p in points],
    )


def _off(losses: Losses) -> float:
    off = abs(float(losses.mean) - float(losses.expected))
    return math.inf if math.isnan(off) else off


def _digests(sums: Aggregates) -> DigestsEntry:
    """Per kind and step, which ranks held which bits. Of very many steps, those are kept where
    ranks disagree, and the first and the last.
    """
    steps = sorted(sums.digests)
    if len(steps) > _MOST_POINTS:
        apart = [s for s in steps if any(len(set(d)) > 1 for d in sums.digests[s].values())]
        steps = sorted({steps[0], steps[-1], *apart[: _MOST_POINTS // 2]})
    return DigestsEntry(
        steps=steps,
        ranks=len(next(iter(sums.digests[steps[0]].values()))),
        kinds={
            kind: [_groups(sums.digests[step][kind]) for step in steps]
            for kind in sums.digests[steps[0]]
        },
    )


def _groups(digests: tuple[str, ...]) -> str:
    """Who held which bits: "0-2,5=07306cef 3=9d1c44a0"; one entry where all agree."""
    ranks: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks.setdefault(digest or "-", []).append(rank)
    return " ".join(f"{_spans(of_digest)}={digest}" for digest, of_digest in ranks.items())


def _spans(ranks: list[int]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
