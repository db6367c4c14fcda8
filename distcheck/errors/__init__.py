"""Errors that users see, each with a message and an exit code; and suggestions for misspelled
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
    """Base class of errors whose message is addressed to the user who ran distcheck."""

    exit_code = ExitCode.UNKNOWN


class UsageError(DistcheckError):
    """The request is invalid: an unknown name, an invalid value, a damaged file."""

    exit_code = ExitCode.USAGE


class LeftOutError(UsageError):
    """All requested cases were left out, because the strategy does not support them."""


class CannotRunError(DistcheckError):
    """The request is valid, but cannot be run on this machine."""

    exit_code = ExitCode.CANNOT_RUN


class OtherBackendError(CannotRunError):
    """The code under test works only on another backend, whose name is `name`."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class NotSimulatedError(CannotRunError):
    """The code under test does something that a simulated world does not support."""


class MembershipError(DistcheckError):
    """The launcher changed the number of ranks during the job, so there is no verdict."""

    exit_code = ExitCode.UNKNOWN


class RankLostError(CannotRunError):
    """A process that runs ranks of the world became unreachable."""

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
    """A process of distcheck sent a result that is invalid for its type."""


class InternalError(DistcheckError):
    """A defect of distcheck. `traceback` comes from the process in which it occurred."""

    exit_code = ExitCode.INTERNAL

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


class VerdictError(DistcheckError, AssertionError):
    """Raised by `Report.raise_for_verdict()`. The message is the part of the report that describes
    the failure.
    """

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


_ALIKE = 0.6  # of difflib's ratio


def most_similar_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to `name`, ignoring case; "" if none
    is similar.
    """
    import difflib  # only errors need it

    lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=_ALIKE)
    return lower[close[0]] if close else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to an error message; "" if no known name is similar."""
    found = most_similar_name(name, known)
    return f" (did you mean {found}?)" if found else ""
