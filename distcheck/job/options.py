"""Options of `distcheck job`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distcheck.errors import UsageError
from distcheck.job import accepting
from distcheck.job.settings import MOST_STEPS, JobSettings
from distcheck.records import MOST_DEADLINE_S, Case


class CommandOptions(JobSettings, frozen=True, kw_only=True):
    """The user's command, the settings of the job's processes, and accepted deviations. If the
    command is a script, it runs on `nproc` ranks.
    """

    words: tuple[str, ...]
    nproc: int | None = None
    accept: tuple[str, ...] = ()


class JobOptions(CommandOptions, frozen=True, kw_only=True):
    """The user's options for a job. Budgets are in bytes, and deadlines in seconds."""

    save: str | None = None
    resumed_from: str | None = None
    no_reference: bool = False
    reference: str | None = None
    strict: bool = False
    twice: bool = False
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        accepting.check_kinds(self.accept)
        if self.reference is not None and (self.no_reference or not self.reference.strip()):
            raise UsageError(
                "--reference requires a command that trains in a single process; pass one, or "
                "pass --no-reference"
            )
        if self.ops and self.save is None:
            raise UsageError(
                "--ops requires a saved recording to compare later; pass --save as well"
            )
        unused = ("resumed_from", "reference", "no_reference", "weights", "accept", "strict")
        if self.twice and (name := next((n for n in unused if getattr(self, n)), "")):
            raise UsageError(
                f"--{name.replace('_', '-')} is for other checks than --twice, which compares the "
                "job with itself; remove one of the two"
            )
        if not 1 <= self.steps <= MOST_STEPS:
            raise UsageError(f"--steps must be between 1 and {MOST_STEPS}")
        if self.from_step < 0:
            raise UsageError("--from-step must be at least 0")
        if not 0 < self.deadline_s <= MOST_DEADLINE_S:
            raise UsageError(f"--deadline must be above 0 and at most {MOST_DEADLINE_S}")


def script_of(arguments: Sequence[str]) -> str:
    """Return the script in a command line, or ""."""
    return next((word for word in arguments[1:] if word.endswith(".py")), "")


def job_case(
    asked: CommandOptions, options: Sequence[str], *, script: str, world: int, **about: Any
) -> Case:
    """Return a case with the known fields `about`, and a command line with `options`."""
    accept = [word for kind in asked.accept for word in ("--accept", kind)]
    start = [] if asked.nproc is None else ["--world", str(asked.nproc)]
    default = {"backend": "none", "device": "cpu", "dtype": "float32", "batch": 0, "steps": 0}
    return Case(
        strategy=Path(script).name or "job", world=world, workload="job", data="job", rerun=False,
        job=(*options, *accept, *start, "--", *asked.words), **{**default, **about},
    )  # fmt: skip
