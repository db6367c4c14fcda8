"""Errors shown to users, each with one sentence and an exit code; and suggestions for misspelled
names.
"""

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `distcheck`; docs/how-it-works.md explains each."""

    PASS = 0
    MISMATCH = 1
    USAGE = 2
    CANNOT_RUN = 3
    RANK_FAILED = 4
    UNKNOWN = 5
    INTERNAL = 70  # EX_SOFTWARE of sysexits.h
    INTERRUPTED = 130  # 128 + SIGINT, as in shells


class DistcheckError(Exception):
    """Base of the errors whose text is meant for the user who ran distcheck."""

    exit_code = ExitCode.UNKNOWN


class UsageError(DistcheckError):
    """The request is not valid: an unknown name, a bad value, a broken file."""

    exit_code = ExitCode.USAGE


class LeftOutError(UsageError):
    """All requested cases are left out, because they have nothing to show for this strategy."""


class CannotRunError(DistcheckError):
    """The request is valid, but this machine cannot run it."""

    exit_code = ExitCode.CANNOT_RUN


class OtherBackendError(CannotRunError):
    """The code under test works on another backend only; `name` is that one's."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class NotSimulatedError(CannotRunError):
    """The code under test does something that a simulated world does not support."""


class MembershipError(DistcheckError):
    """The launcher changed the number of ranks of a running job: nothing is known."""

    exit_code = ExitCode.UNKNOWN


class RankLostError(CannotRunError):
    """A process with ranks of the world is unreachable."""

    exit_code = ExitCode.RANK_FAILED


class FolderGoneError(RankLostError):
    """The working directory was removed or renamed while ranks ran."""

    def __init__(self) -> None:
        super().__init__(
            "the working directory no longer exists: the code under test or another process "
            "removed or renamed it while ranks ran; remove and rename only folders that the code "
            "created"
        )


class HelperError(DistcheckError):
    """The process that forks the ranks ended unexpectedly."""

    exit_code = ExitCode.CANNOT_RUN


class AnswerError(CannotRunError):
    """A process of distcheck answered with a value that its field cannot hold."""


class InternalError(DistcheckError):
    """A defect of distcheck; `traceback` is that of the process in which it occurred."""

    exit_code = ExitCode.INTERNAL

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


class VerdictError(DistcheckError, AssertionError):
    """Raised by `Report.raise_for_verdict()`; its text is the failing part of the report."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


_ALIKE = 0.6  # of difflib's ratio


def most_similar_name(name: str, known: Iterable[str]) -> str:
    """Return the known name most similar to a given one, ignoring case; "" if none is."""
    import difflib  # only errors need it

    lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=_ALIKE)
    return lower[close[0]] if close else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the question to append to the name; "" if no known name is similar."""
    found = most_similar_name(name, known)
    return f" (did you mean {found}?)" if found else ""
