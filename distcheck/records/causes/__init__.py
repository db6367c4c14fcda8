"""The table of causes: what each one is, when it is named, and what to do about it. No torch.

One TOML file a family, in the order in which documentation shows it; every field is described at
`Cause`. A diagnosis is made by `name_cause` alone: what code names must be in the table, and the
words of a suggestion stand nowhere else. The files are read when a cause is first asked for.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from distcheck.records import Diagnosis

FAMILIES = ("gradients", "layouts", "updates", "state", "runs", "jobs")
APART = "what was recorded cannot tell this from"  # begins what follows several causes
NOT_EXERCISED = "not-exercised"  # of a pass alone; screens show it with what a pass does not show
_USUAL = "usual"  # the variant where a call names none
LineKind = Literal[
    "given", "exchanges", "reduces", "backward", "clip", "step", "loader", "collective"
]
By = Literal["verify", "job", "guard", "compare"]


class InJobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a cause of `verify` shows in a whole job, where that is otherwise."""

    when: str
    repair: str
    confused: str = ""


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the table.

    what        what is wrong, in one line
    when        what must be seen for it to be named
    repair      in short, what to do or where to look
    confused    what else looks so, or nearly so
    needs       what a run must have for it to be named
    by          the commands that name it; of the family `jobs`, `job` where nothing is said
    lines       the lines of the code under test that it is about, of a sync or of a job: of the
                calls that a gradient was `given` to; of the only call that `exchanges` it; of the
                only one that `reduces` it, where what backward left was right; in a job, of
                what the recorder hears of
    seen        public reports of it
    wrong, right  a small example, and how it should be
    suggestion  what a report says to do: one text, or one for each variant; `{name}` stands for
                what the place that names the cause gives
    """

    name: str
    family: str
    what: str
    when: str
    repair: str
    confused: str = ""
    needs: str = ""
    by: tuple[By, ...] = ("verify",)
    lines: tuple[LineKind, ...] = ()
    seen: tuple[str, ...] = ()
    wrong: str
    right: str
    suggestion: str | dict[str, str]
    in_jobs: InJobs | None = None

    @property
    def suggestions(self) -> Mapping[str, str]:
        return {_USUAL: self.suggestion} if isinstance(self.suggestion, str) else self.suggestion


@cache
def causes() -> Mapping[str, Cause]:
    found = {}
    for family in FAMILIES:
        named_by = ("job",) if family == "jobs" else ("verify",)
        for name, fields in _read(family).items():
            entry = {"by": named_by, **fields, "name": name, "family": family}
            found[name] = msgspec.convert(entry, Cause)
    return found


@cache
def shared() -> Mapping[str, str]:
    """Suggestions that several causes share, by the name of the variant."""
    return msgspec.convert(_read("shared"), dict[str, str])


def _read(name: str) -> dict[str, dict[str, object]]:
    return tomllib.loads(files(__name__).joinpath(f"{name}.toml").read_text("utf-8"))


def name_cause(cause: str, evidence: str, /, *variants: str, **given: object) -> Diagnosis:
    """A diagnosis, with the suggestions of these variants; `given` is what they say in braces.
    Raises KeyError for what is not in the table.
    """
    return Diagnosis(
        cause=cause, evidence=evidence, suggestion=suggested(cause, *variants, **given)
    )


def suggested(cause: str, /, *variants: str, **given: object) -> str:
    """The suggestions of these variants, one after the other."""
    texts = {**shared(), **causes()[cause].suggestions}
    return "; ".join(texts[variant].format(**given) for variant in variants or (_USUAL,))
