"""Stores failing cases, which the next search runs first, and prints them as Python code."""

import re
from pathlib import Path

import xxhash

from distcheck.errors import DistcheckError
from distcheck.plan.provenance import is_sealed_by_user, provenance_of
from distcheck.private import is_private_folder
from distcheck.records import Case
from distcheck.store.run_folder import (
    DEFAULT_FOLDER,
    private_folder,
    read_case,
    read_provenance,
    write_case,
)
from distcheck.store.trust import untrusted_code

_FOLDER = DEFAULT_FOLDER / "explore"
_DEFAULT_DEADLINE_S = 30.0


class FailureDatabase:
    """Stores the failing cases of strategies, in one folder per strategy."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        name = re.sub(r"[^\w.+-]+", "-", strategy.rpartition("/")[2]).strip("-.") or "strategy"
        self.folder = _FOLDER / f"{name}-{xxhash.xxh3_64_hexdigest(strategy.encode())[:8]}"
        self.unreadable: list[str] = []

    def read(self) -> list[Case]:
        """Return all stored cases, newest first. Return none if other users can write to the
        folder, because the search runs these cases without confirmation.
        """
        if not all(map(is_private_folder, (DEFAULT_FOLDER, _FOLDER, self.folder))):
            return []
        files = sorted(self.folder.glob("*.json"), key=lambda file: -file.stat().st_mtime)
        found = [case for case in map(self._read_case, files) if case is not None]
        return [case for case in found if case.strategy == self._strategy]

    def keep(self, case: Case) -> Path | None:
        """Store a case and return the path of its file; None if the file cannot be written."""
        path = self.folder / f"{case.id}.json"
        try:
            private_folder(_FOLDER.name)
            write_case(path, case, provenance_of(case, {}))
        except (OSError, DistcheckError):
            return None
        return path

    def _read_case(self, file: Path) -> Case | None:
        """Return the case in a file; None if this user has not run it, or if `replay` would ask
        before it runs the case's code. The user has named the strategy, so no confirmation is
        needed for its code.
        """
        try:
            case, made = read_case(file), read_provenance(file)
            unknown = untrusted_code([case], made={} if made is None else {case.id: made})
        except DistcheckError as error:
            self.unreadable.append(str(error))
            return None
        if is_sealed_by_user(case, made) and all(code.what == "strategy" for code in unknown):
            return case
        self.unreadable.append(
            f"{file} is not a case of your own runs; look at distcheck replay {file}"
        )
        return None


def reproducing_program(case: Case) -> str:
    """Return a short Python program that runs the case and fails in the same way."""
    said = case.adaptation
    words: dict[str, object] = {
        "world": case.world,
        "workload": case.workload,
        "batch": case.batch,
        "steps": case.steps,
        "seed": case.seed,
        "dtype": case.dtype,
    }
    if case.backend != "gloo":
        words["backend"] = case.backend
    if case.schedules:
        words["schedules"] = case.schedules
    if case.deadline_s != _DEFAULT_DEADLINE_S:
        words["deadline_s"] = case.deadline_s
    if said.form:
        words["form"] = said.form
    for option, pairs in (("arguments", said.arguments), ("variables", said.variables)):
        if pairs:
            words[option] = _Written(f"{{{', '.join(f'{n!r}: {_literal(v)}' for n, v in pairs)}}}")
    methods = {"finish": said.finish, "reset": said.reset}
    words |= {option: method for option, method in methods.items() if method}
    if case.loss != "mean":
        words["loss"] = case.loss
    if case.delays:
        words["delays"] = [(late.rank, late.collective, late.ms) for late in case.delays]
    lines = [f"    {_quote(case.strategy)},"]
    lines += [f"    {name}={_quote(value)}," for name, value in words.items()]
    call = "\n".join(lines)
    return f"import distcheck\n\ndistcheck.verify(\n{call}\n).raise_for_verdict()\n"


class _Written(str):
    """Text that `_quote` leaves unchanged, because it is already Python code."""


def _literal(text: str) -> str:
    """Return an argument as Python code: a literal, or a string for a special value such as
    `@rank`.
    """
    return _quote(text) if text.startswith("@") else text


def _quote(value: object) -> str:
    if isinstance(value, _Written) or not isinstance(value, str):
        return str(value)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
