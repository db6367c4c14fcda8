"""Excludes parts of generated models that a strategy cannot train. Does not import torch.

A strategy declines a cell of `--thorough`. The words here name the corresponding parts of generated
models.
"""

from collections.abc import Collection, Iterator, Mapping

from distcheck.contract import Contract, Training
from distcheck.records import Case
from distcheck.records.generated_words import PREFIX, SCHEDULE, parse_model_words
from distcheck.workloads.cells import CELLS, why_declined

ACCUMULATE, ABSENT = "accumulate", "absent"
# Cells with the property that a word stands for. The cell may be of another version of distcheck.
CELLS_OF: Mapping[str, Collection[str]] = {
    "strided": ("transposed", "channels_last"),
    "frozen": ("frozen_parameters",),
    "tied": ("tied_weights",),
    ABSENT: ("unused_later", "absent_on_some"),
    SCHEDULE: ("schedule",),
}


def declined_words(contract: Contract, *, own_backward: bool, own_update: bool) -> dict[str, str]:
    """Return the words that are excluded for a strategy, each with the reason."""
    found = {}
    for word, cells in CELLS_OF.items():
        names = [name for name in contract.declines if name in cells]
        if names:
            found[word] = f"its contract declines {names[0]} ({CELLS[names[0]].about})"
    accumulation = why_declined("", contract, Training(accumulate=2), own_update=own_update)
    if own_backward:
        accumulation = (
            "it runs backward itself, and the shards of generated cases do not divide into equal "
            "micro-batches"
        )
    return found | ({ACCUMULATE: accumulation} if accumulation else {})


def declinable_words(workload: str) -> set[str]:
    """Return the words of `CELLS_OF`, and `accumulate`, in a generated workload."""
    if not workload.startswith(PREFIX):
        return set()
    model = parse_model_words(workload.removeprefix(PREFIX))
    marks = {mark for layer in model.layers for mark in layer.marks}
    loop = {ACCUMULATE: model.accumulate > 1, SCHEDULE: model.schedule}
    return (marks & {*CELLS_OF}) | {word for word, there in loop.items() if there}


def words_of_cells(cells: Collection[str]) -> Iterator[tuple[str, str]]:
    for word, names in {**CELLS_OF, ACCUMULATE: ("accumulation",)}.items():
        yield from ((word, name) for name in cells if name in names)


def notes_on_words(case: Case) -> list[str]:
    """Return notes on words of a case that the next search may have to exclude."""
    if not case.workload.startswith(PREFIX):
        return []
    notes = []
    passes = parse_model_words(case.workload.removeprefix(PREFIX)).accumulate
    if passes > 1:
        notes.append(
            f"every step has {passes} backward passes; if your code never has more than one, "
            "search with --without accumulate"
        )
    if ABSENT in declinable_words(case.workload):
        notes.append(
            "in some steps a parameter has no gradient (None) on some ranks; if that never happens "
            "in your models, search with --without absent"
        )
    return notes


def why_words_declined(
    workload: str, contract: Contract, *, own_backward: bool, own_update: bool
) -> str:
    """Return the reason that a strategy cannot train a generated workload; empty if it can."""
    words = declinable_words(workload)
    if not words:
        return ""
    declined = declined_words(contract, own_backward=own_backward, own_update=own_update)
    return next((f"{word}: {why}" for word, why in declined.items() if word in words), "")
