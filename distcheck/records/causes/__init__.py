"""The table of causes: description, symptoms and fix of each cause. Does not import torch.

Each family has a TOML file, in the order of the documentation; `Cause` describes the fields. Only
`name_cause` creates a diagnosis. It rejects a cause that is not in the table. Suggestions are
written only in the table. The files are read on first use.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from distcheck.records import Diagnosis

FAMILIES = ("gradients", "layouts", "updates", "state", "runs", "jobs", "scores")
APART = "what was recorded cannot tell this from"  # starts the list of indistinguishable causes
NOT_EXERCISED = "not-exercised"  # only in a pass; screens print it with uncovered properties
_USUAL = "usual"  # the default variant
LineKind = Literal[
    "given", "exchanges", "reduces", "backward", "clip", "step", "loader", "collective"
]
By = Literal["verify", "job", "guard", "compare"]


class CauseInJobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Symptoms and fix of a cause in a whole job, if they differ from those in `verify`."""

    when: tuple[str, ...]
    repair: str
    confused: str = ""


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the table.

    what        the mistake, in one sentence on one line
    when        observable symptoms; any one of them suffices to name the cause
    repair      a short instruction that starts with a verb
    confused    causes with the same or similar symptoms
    needs       requirements on a run; without them the cause is never named
    by          commands that name the cause; the default is `job` in the family `jobs`, and
                `verify` in the others
    lines       calls in the code under test to print with the cause. In a sync: all calls that a
                gradient was `given` to, the only call that `exchanges` it, or the only call that
                `reduces` it (if local gradients were right). In a job: events that the recorder
                records
    seen        public bug reports
    wrong, right  a small example of the mistake, and the correct code
    suggestion  advice in a report: one text, or one per variant; the caller that names the cause
                supplies the values of `{name}` placeholders
    """

    name: str
    family: str
    what: str
    when: tuple[str, ...]
    repair: str
    confused: str = ""
    needs: str = ""
    by: tuple[By, ...] = ("verify",)
    lines: tuple[LineKind, ...] = ()
    seen: tuple[str, ...] = ()
    wrong: str
    right: str
    suggestion: str | dict[str, str]
    in_jobs: CauseInJobs | None = None

    @property
    def suggestions(self) -> Mapping[str, str]:
        return {_USUAL: self.suggestion} if isinstance(self.suggestion, str) else self.suggestion


@cache
def causes() -> Mapping[str, Cause]:
    found = {}
    for family in FAMILIES:
        named_by = ("job",) if family == "jobs" else ("verify",)
        for name, fields in read_table(family).items():
            entry = {"by": named_by, **fields, "name": name, "family": family}
            found[name] = msgspec.convert(entry, Cause)
    return found


@cache
def shared_suggestions() -> Mapping[str, str]:
    """Return the suggestions that several causes share, by name of the variant."""
    return msgspec.convert(read_table("shared"), dict[str, str])


def read_table(name: str) -> dict[str, dict[str, object]]:
    return tomllib.loads(files(__name__).joinpath(f"{name}.toml").read_text("utf-8"))


def name_cause(cause: str, evidence: str, /, *variants: str, **given: object) -> Diagnosis:
    """Return a diagnosis with the suggestions of the given variants; `given` has the values of
    their placeholders. Raises KeyError for a cause that is not in the table.
    """
    return Diagnosis(
        cause=cause, evidence=evidence, suggestion=joined_suggestions(cause, *variants, **given)
    )


def joined_suggestions(cause: str, /, *variants: str, **given: object) -> str:
    texts = {**shared_suggestions(), **causes()[cause].suggestions}
    return "; ".join(texts[variant].format(**given) for variant in variants or (_USUAL,))
