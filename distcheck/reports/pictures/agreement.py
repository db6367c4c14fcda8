"""Draws which pairs of ranks have equal bits, at the first step at which ranks disagree."""

from distcheck.records.odd_ranks import outside_the_majority
from distcheck.reports.document import DigestsEntry
from distcheck.reports.pictures import Drawing, Picture, Table, cell, cross, ticks

_LABEL, _TOP = 46, 22
_MOST_ROWS = 60
_NAMES = {"gradient": "gradients", "parameter": "parameters", "optimizer": "optimizer state"}

Groups = dict[str, list[int]]  # digest: ranks


def draw(name: str, found: DigestsEntry) -> Picture:
    """Draw the first step at which ranks disagree, or the last if they never do."""
    steps, ranks = found.steps, found.ranks
    kinds = {kind: [_groups(text) for text in row] for kind, row in found.kinds.items()}
    apart = [(at, kind) for at in range(len(steps)) for kind in kinds if len(kinds[kind][at]) > 1]
    last_kind = "parameter" if "parameter" in kinds else next(iter(kinds))
    at, kind = apart[0] if apart else (len(steps) - 1, last_kind)
    groups = kinds[kind][at]
    odd = outside_the_majority(groups)
    tie = len(groups) > 1 and not odd
    drawing = Drawing(name, 320)
    size = min(26.0, (drawing.width - _LABEL - 8) / ranks)
    held = {rank: digest for digest, of_digest in groups.items() for rank in of_digest}
    same, differs, crosses = [], [], []
    for a in range(ranks):
        for b in range(ranks):
            place = (_LABEL + size * b, _TOP + size * a, size - 1, size - 1)
            if held.get(a) == held.get(b):
                same.append(cell(*place))
            else:
                differs.append(cell(*place))
                crosses.append(cross(*place))
    drawing.path("same", "".join(same))
    drawing.path("over", "".join(differs))
    drawing.path("cross", "".join(crosses) if size > 5 else "")
    for rank in ticks(ranks, 16):
        mark = f"{rank}{' ◂' if rank in odd else ''}"
        drawing.text(_LABEL + size * (rank + 0.5), _TOP - 6, str(rank), kind="faint", end="middle")
        y = _TOP + size * (rank + 0.5) + 4
        drawing.text(_LABEL - 6, y, mark, kind="label" if rank in odd else "faint", end="end")
    drawing.text(0, _TOP - 6, "rank", kind="faint")
    what = f"{_NAMES.get(kind, kind)} after step {steps[at]}"
    title = f"Agreement of ranks: {what}"
    says = _describe(groups, odd, what, never=not apart, tie=tie)
    rows = [
        [str(steps[i]), _NAMES.get(k, k), "; ".join(_group_text(d, r) for d, r in g.items())]
        for i, k, g in _table_rows(kinds, len(steps), apart)
    ]
    table = Table(["step", "what", "ranks: digest"], rows)
    svg = drawing.markup(_TOP + size * ranks + 6, title=title, says=says)
    remark = "" if len(apart) <= _MOST_ROWS else f"The first {_MOST_ROWS} disagreements are listed."
    return Picture(title, says, svg, table, remark)


def _table_rows(
    kinds: dict[str, list[Groups]], steps: int, apart: list[tuple[int, str]]
) -> list[tuple[int, str, Groups]]:
    """Return the rows of the table: disagreements, or the last step of all kinds."""
    listed = apart[:_MOST_ROWS] or [(steps - 1, kind) for kind in kinds]
    return [(at, kind, kinds[kind][at]) for at, kind in listed]


def _describe(groups: Groups, odd: list[int], what: str, *, never: bool, tie: bool) -> str:
    if never:
        return f"All ranks are bit-identical at every step. The rows show the {what}."
    if tie:
        return (
            f"The {what} diverge first: there are {len(groups)} versions, and no version is held "
            "by most ranks. The picture therefore cannot show which ranks are wrong."
        )
    names = ", ".join(map(str, odd))
    one = len(odd) == 1
    return (
        f"The {what} diverge first: rank{'' if one else 's'} {names} (marked ◂) "
        f"differ{'s' if one else ''} from the other ranks."
    )


def _groups(text: str) -> Groups:
    """Parse "0-2,5=07306cef 3=9d1c44a0"."""
    found: Groups = {}
    for part in text.split():
        ranks, _, digest = part.partition("=")
        for span in ranks.split(","):
            first, _, last = span.partition("-")
            found.setdefault(digest, []).extend(range(int(first), int(last or first) + 1))
    return found


def _group_text(digest: str, ranks: list[int]) -> str:
    return f"{', '.join(map(str, ranks))}: {'not recorded' if digest == '-' else digest}"
