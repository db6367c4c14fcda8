"""Findings of a guard, and the bundle that stores them: one JSON file, treated as untrusted."""

import math
from pathlib import Path

import msgspec

from distcheck import private
from distcheck.errors import UsageError
from distcheck.records.decoding import decode_json, read_bounded, read_distcheck_document
from distcheck.records.ledger import Ledger

SCHEMA = "distcheck.guard/1"
_MOST_BYTES, _MOST_BYTES_OF_A_RANK = 64 << 20, 1 << 20

# Contents of the optimizer gradient, and whether the finding recurred.
OWN, OTHER, LEFT_OUT = "own", "other", "left out"
AGAIN, ONCE, LAST = "again", "once", "last"
_WHEN = {
    AGAIN: "reproduced at the next step",
    ONCE: "not reproduced at the next step",
    LAST: "at the last step of training",
}


class ReplicaFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of state that differs across ranks, or that is equal but must differ.

    first        the first parameter, buffer or setting
    groups       groups of ranks that agree on it, the largest first
    differing    how many of `compared` names differ; `names` has the first 64. For samples: the
                 number of samples that ranks have in common
    values       values by rank, if they are numbers
    what, when   for an audit: the contents of the optimizer gradient, and whether the finding
                 recurred at the next step
    """

    kind: str
    first: str
    groups: tuple[tuple[int, ...], ...]
    differing: int = 1
    compared: int = 1
    names: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    what: str = ""
    when: str = ""

    @property
    def is_partly(self) -> bool:
        """For samples: True if only some of a rank's samples are those of another rank."""
        return self.differing < self.compared


class TensorProjections(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of every rank, as 64 projections each (`distcheck.recordings.jobs.sketches`)."""

    name: str
    elements: int
    by_rank: tuple[tuple[float, ...], ...]


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a check. `agreed_at` is the last step at which ranks agreed, or -1;
    `state_compared` is the number of compared tensors of optimizer state, without step counts.
    """

    schema: str = SCHEMA
    step: int
    agreed_at: int
    every: int
    ranks: tuple[int, ...]
    findings: tuple[ReplicaFinding, ...]
    sums: tuple[TensorProjections, ...] = ()
    state_compared: int = 0
    optimizer: str = ""
    wrapper: str = ""
    versions: dict[str, str] = {}
    file: str = ""

    @property
    def text(self) -> str:
        """The differences, one line per kind."""
        return "\n".join(sentence_on_finding(one, self) for one in self.findings)


def abbreviated_ranks(ranks: tuple[int, ...]) -> str:
    """Format ranks as `rank 3` or `ranks 0, 1, 2`; long lists are abbreviated."""
    shown = [str(rank) for rank in ranks]
    if len(shown) > 8:
        shown = [*shown[:6], "...", shown[-1]]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


def sentence_on_finding(found: ReplicaFinding, of: Divergence) -> str:
    since = f"; they agreed at step {of.agreed_at}" if of.agreed_at >= 0 else ""
    groups = " and ".join(abbreviated_ranks(group) for group in found.groups[:4])
    groups += f" and {len(found.groups) - 4} more groups" if len(found.groups) > 4 else ""
    if found.kind == "samples":
        which = f"{found.differing} of {found.compared}" if found.is_partly else "the same"
        return (
            f"step {of.step}: {abbreviated_ranks(found.groups[0])} trained on {which} samples"
            + (" in common" if found.is_partly else "")
        )
    if found.kind == "random streams":
        ranks = abbreviated_ranks(found.groups[0])
        return f"step {of.step}: {ranks} drew the same random numbers in forward"
    if found.kind == "steps":
        return f"{groups} made different numbers of optimizer steps: {', '.join(found.values)}"
    if found.kind == "initial state":
        return f"step {of.step}: {groups} began with different parameters"
    if found.kind == "names of parameters":
        return f"step {of.step}: {groups} hold different parameters (names, shapes or dtypes)"
    if found.kind == "settings":
        return (
            f"step {of.step}: {found.first} differs between {groups}: {', '.join(found.values[:8])}"
        )
    if found.kind == "exchange":
        got = {
            OWN: f"{found.first}: each rank steps by its local gradient",
            LEFT_OUT: f"the gradients passed to the optimizer do not include those of {groups}",
        }.get(
            found.what,
            f"{found.first}: the gradient passed to the optimizer is not a weighted mean of the "
            "ranks' gradients",
        )
        many = f" ({found.differing} of {found.compared} parameters)" if found.names else ""
        return f"step {of.step}: {got}{many}; {_WHEN.get(found.when, '')}"
    if not found.names:
        return f"step {of.step}: {found.kind} differ between {groups}{since}"
    what = {"parameters": "", "buffers": "buffer "}.get(found.kind, f"{found.kind} ")
    return (
        f"step {of.step}: {what}{found.first} differs between {groups} ({found.differing} of "
        f"{found.compared} tensors differ{since})"
    )


def write(difference: Divergence, folder: Path) -> Path:
    """Write a bundle to a new file in `folder` and return the file. Raises OSError, and
    CannotRunError if `.distcheck` belongs to another user.
    """
    if folder.parent.name == ".distcheck":
        # Imported here because training needs nothing else of that module.
        from distcheck.store.run_folder import private_folder

        private_folder(folder.name, folder.parent)
    else:
        private.folder(folder)
    stem = f"step-{difference.step:06d}"
    for number in range(1000):
        file = folder / (f"{stem}.json" if not number else f"{stem}-{number}.json")
        try:
            with private.new_file(file) as out:
                out.write(msgspec.json.encode(difference))
            return file
        except FileExistsError:
            continue
    raise OSError(f"{folder} holds 1000 files of step {difference.step}")


def read(file: Path) -> Divergence:
    """Read a bundle. Raises UsageError for another or a damaged file."""
    found = read_distcheck_document(
        file, Divergence, schema=SCHEMA, name=str(file), most=_MOST_BYTES,
        why="is not a bundle of distcheck.guard ({error}); pass the file that its message names",
    )  # fmt: skip
    if not found.findings or not found.ranks or not all(one.groups for one in found.findings):
        raise UsageError(f"{file} is damaged: it has no finding; pass a different file")
    for sums in found.sums:
        is_sound = all(math.isfinite(value) for row in sums.by_rank for value in row)
        lengths = {len(row) for row in sums.by_rank}
        if not is_sound or lengths != {64} or len(sums.by_rank) != len(found.ranks):
            raise UsageError(f"{file} is damaged: its sums of {sums.name} do not match its ranks")
    return found


class GuardProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one optimizer's guard in one rank, as written for the front-end process."""

    rank: int
    world: int
    optimizer: str
    steps: int
    checks: int
    checked_at: int = -1
    compared: int
    first: str = ""
    file: str = ""
    remarks: tuple[str, ...] = ()
    ledger: Ledger | None = None


def read_guard_progress(file: Path) -> GuardProgress:
    """Read such a file. Raises msgspec.MsgspecError and OSError."""
    return decode_json(read_bounded(file, _MOST_BYTES_OF_A_RANK), GuardProgress)
