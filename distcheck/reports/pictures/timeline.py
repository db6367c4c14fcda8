"""Draws the last collectives of every rank in columns; marks missing ranks and deviating calls."""

from collections.abc import Mapping, Sequence

from distcheck.records import Collective, Outcome, odd_ranks
from distcheck.records.exit_status import RankEnd
from distcheck.records.odd_ranks import (
    Key,
    first_call_mismatch,
    first_unreached_call,
    group_ranks_by_call,
    grouped,
    ranks_in_words,
)
from distcheck.reports.pictures import Drawing, Picture, Table, cell, cross, shorten_middle, ticks

_LABEL, _TOP, _ROW = 100, 32, 22
_MOST_COLUMNS = 40

Ends = Sequence[Outcome | Outcome]


def draw(name: str, outcomes: Ends) -> Picture | None:
    """Draw the calls. Return None if no rank reported any."""
    calls = {o.rank: {_key(c): c for c in o.collectives or ()} for o in outcomes}
    keys = _columns({key for of_rank in calls.values() for key in of_rank})
    if not keys:
        return None
    named = {rank: {key: _name(call) for key, call in own.items()} for rank, own in calls.items()}
    unknown = sum(not own for own in named.values())
    usual = {
        key: odd_ranks.majority_call(group_ranks_by_call(named, key), unknown=unknown)
        for key in keys
    }
    drawing = Drawing(name, 700 if len(keys) > 9 else 320)
    width = min(26.0, (drawing.width - _LABEL - 6) / len(keys))
    strips = _Strips(drawing, width)
    rows: list[list[str]] = []
    ended = {o.rank: o.outcome for o in outcomes}
    for line_no, rank in enumerate(sorted(calls)):
        y = _TOP + _ROW * line_no
        drawing.text(_LABEL - 6, y + 14, f"{rank} {ended[rank]}", end="end")
        if not calls[rank]:
            words = "exited; no data" if ended[rank] != RankEnd.FINISHED else "not asked"
            drawing.text(_LABEL, y + 14, words, kind="faint")
            rows.append([str(rank), "", "", words])
            continue
        for column, key in enumerate(keys):
            state = _state(calls[rank], key, usual[key])
            strips.add(column, y, state)
            if state in ("missing", "differs", "not finished"):
                rows.append([str(rank), str(key[2]), _name(calls[rank].get(key)), state])
    strips.draw()
    _draw_numbers(drawing, keys, width)
    bottom = _legend(drawing, _TOP + _ROW * len(calls) + 8)
    says = _describe_deviations(outcomes, named)
    title = "Collectives of every rank, at the end"
    table = Table(["rank", "call", "operation", "state"], rows)
    return Picture(title, says, drawing.markup(bottom, title=title, says=says), table)


class _Strips:
    """The cells of all ranks, grouped by appearance."""

    def __init__(self, drawing: Drawing, width: float) -> None:
        self._drawing, self._width = drawing, width
        self._paths: dict[str, list[str]] = {
            kind: [] for kind in ("same", "over", "cross", "open", "gone")
        }
        self._unfinished: list[tuple[float, float]] = []

    def add(self, column: int, y: float, state: str) -> None:
        place = (_LABEL + self._width * column, y, self._width - 1.5, _ROW - 5.0)
        look = {"missing": "open", "not seen": "open", "differs": "over"}.get(state, "same")
        self._paths[look].append(cell(*place))
        if state in ("missing", "differs"):
            self._paths["gone" if state == "missing" else "cross"].append(cross(*place))
        if state == "not finished":
            self._unfinished.append((place[0] + place[2] / 2, y + 11))

    def draw(self) -> None:
        for kind, paths in self._paths.items():
            self._drawing.path(kind, "".join(paths))
        for x, y in self._unfinished:
            self._drawing.text(x, y, "…", end="middle")


def _draw_numbers(drawing: Drawing, keys: list[Key], width: float) -> None:
    for column in ticks(len(keys), 14):
        x = _LABEL + width * (column + 0.5)
        drawing.text(x, _TOP - 8, str(keys[column][2]), kind="faint", end="middle")
    lanes = _group_labels(keys)
    for column, words in lanes.items() if len(lanes) > 1 else ():
        drawing.text(_LABEL + width * column, 9, words, kind="faint")
    drawing.text(0, _TOP - 8, "rank, call number", kind="faint")


def _columns(keys: set[Key]) -> list[Key]:
    """Return the columns of calls: grouped by process group, by number, the last of each."""
    groups = grouped(sorted(keys), lambda key: key[:2])
    room = max(1, _MOST_COLUMNS // max(1, len(groups)))
    return [key for of_group in groups.values() for key in of_group[-room:]]


def _group_labels(keys: list[Key]) -> dict[int, str]:
    """Return the label of each group, by the index of the first column with its calls."""
    found: dict[int, str] = {}
    for column, key in enumerate(keys):
        if column == 0 or keys[column - 1][:2] != key[:2]:
            found[column] = f"group {key[0]}" + (", send and receive" if key[1] else "")
    return found


def _key(call: Collective) -> Key:
    return call.group, call.point_to_point, call.number


def _name(call: Collective | None) -> str:
    return "" if call is None else call.with_shapes(shorten_middle(call.shapes, 60))


def _state(own: Mapping[Key, Collective], key: Key, usual: str) -> str:
    call = own.get(key)
    if call is None:
        same = [k[2] for k in own if k[:2] == key[:2]]
        return "missing" if same and key[2] > max(same) and not key[1] else "not seen"
    if not key[1] and _name(call) != usual:  # sends and receives always differ
        return "differs"  # in a tie all of them do
    return "same" if call.finished else "not finished"


def _legend(drawing: Drawing, y: float) -> float:
    """Draw the legend in two rows, which fit the narrowest drawing."""
    lower, column = y + 18, 100
    for x, top, look, words in (
        (0, y, "same", "same call as most ranks"),
        (column, y, "over", "different call"),
        (0, lower, "open", "not called"),
    ):
        drawing.path(look, cell(x + 0.5, top, 12, 12))
        drawing.text(x + 17, top + 10, words, kind="faint")
    drawing.path("cross", cross(column + 0.5, y, 12, 12))
    drawing.path("gone", cross(0.5, lower, 12, 12))
    drawing.text(column, lower + 10, "…", kind="faint")
    drawing.text(column + 17, lower + 10, "not finished", kind="faint")
    return lower + 18


def _describe_deviations(outcomes: Ends, calls: odd_ranks.Calls) -> str:
    """Describe deviating or missing calls, in the words of the diagnosis."""
    parts = []
    apart = first_call_mismatch(calls)
    proven = [o.why or "" for o in outcomes if o.proven == "mismatch"]
    if proven or apart is not None:
        words = proven[0] if proven else apart.in_words() if apart else ""
        parts.append(f"{words[0].upper()}{words[1:]}.")
    bad = [o for o in outcomes if o.outcome not in (RankEnd.FINISHED, RankEnd.HUNG, RankEnd.ENDED)]
    culprits = [o.rank for o in bad if not o.lost_peer and not o.sizes_differ]
    victims = {o.rank for o in outcomes if o.rank not in culprits} if culprits else set()
    victims |= {o.rank for o in bad if o.lost_peer}
    behind = first_unreached_call(calls, besides=victims)
    if behind is not None:
        number, ranks = behind
        parts.append(f"Call {number} is missing on {ranks_in_words(ranks)}.")
    elif culprits and not parts:
        parts.append(
            f"{ranks_in_words(culprits[:1]).capitalize()} failed first; the missing calls of "
            "other ranks are a consequence."
        )
    return " ".join(parts) or "All ranks that reported data made the same calls."
