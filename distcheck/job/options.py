"""What a person asks of `distcheck job`."""

from dataclasses import dataclass

from distcheck.errors import UsageError
from distcheck.job import accepting, settings
from distcheck.records import MOST_DEADLINE_S


@dataclass(frozen=True)
class JobOptions:
    """What a person asks of a job."""

    words: tuple[str, ...]
    nproc: int | None = None
    steps: int = 8
    from_step: int = 0
    budget: int = 4 << 30
    keep_going: bool = False
    save: str | None = None
    resumed_from: str | None = None
    modules: bool = False
    ops: bool = False
    no_reference: bool = False
    reference: str | None = None
    weights: str | None = None
    mesh: str = ""
    on_cpu: bool = False
    accept: tuple[str, ...] = ()
    strict: bool = False
    deadline_s: float = 300.0

    @property
    def wants_reference(self) -> bool:
        return not (self.no_reference or self.from_step or self.resumed_from)

    @property
    def watches_modules(self) -> bool:
        return self.modules or self.ops

    def __post_init__(self) -> None:
        accepting.check_kinds(self.accept)
        if self.reference is not None and (self.no_reference or not self.reference.strip()):
            raise UsageError(
                "--reference takes a command that trains as one process; give it, or give "
                "--no-reference"
            )
        if self.ops and self.save is None:
            raise UsageError(
                "--ops is for a recording that is compared with another one; give --save as well"
            )
        if not 1 <= self.steps <= settings.MOST_STEPS:
            raise UsageError(f"--steps must be between 1 and {settings.MOST_STEPS}")
        if self.from_step < 0:
            raise UsageError("--from-step must be at least 0")
        if not 0 < self.deadline_s <= MOST_DEADLINE_S:
            raise UsageError(f"--deadline must be above 0, and at most {MOST_DEADLINE_S}")
