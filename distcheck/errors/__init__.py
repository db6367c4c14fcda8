"""Errors that a person sees: one clear sentence each, with the exit code it leads to."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What `distcheck` exits with; docs/how-it-works.md explains each."""

    PASS = 0
    MISMATCH = 1
    USAGE = 2
    CANNOT_RUN = 3
    RANK_FAILED = 4
    UNKNOWN = 5
    INTERNAL = 70  # EX_SOFTWARE of sysexits.h
    INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class DistcheckError(Exception):
    """Base of the errors whose text is meant for the person who ran distcheck."""

    exit_code = ExitCode.UNKNOWN


class UsageError(DistcheckError):
    """What was asked for is not valid: an unknown name, a bad value, a broken file."""

    exit_code = ExitCode.USAGE


class LeftOutError(UsageError):
    """Nothing was asked for but what has nothing to show for this strategy."""


class CannotRunError(DistcheckError):
    """What was asked for is sound, but this machine cannot run it."""

    exit_code = ExitCode.CANNOT_RUN


class OtherBackendError(CannotRunError):
    """The code under test works on another backend only; `name` is that one's."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class NotSimulatedError(CannotRunError):
    """The code under test does something that a simulated world cannot do."""


class MembershipError(DistcheckError):
    """The launcher has changed the number of ranks of a run that had begun: nothing is known."""

    exit_code = ExitCode.UNKNOWN


class RankLostError(CannotRunError):
    """A process with ranks of the world cannot be reached any more."""

    exit_code = ExitCode.RANK_FAILED


class FolderGoneError(RankLostError):
    """The working directory was removed or renamed while ranks ran."""

    def __init__(self) -> None:
        super().__init__(
            "the working directory is gone: the code under test removed or renamed it, or "
            "something else did, while ranks ran; let the code remove and rename folders of its "
            "own only"
        )


class HelperError(DistcheckError):
    """The process that forks the ranks ended on its own account."""

    exit_code = ExitCode.CANNOT_RUN


class AnswerError(CannotRunError):
    """A process of distcheck's has answered with something that its field cannot hold."""


class InternalError(DistcheckError):
    """A defect of distcheck itself; `traceback` is that of the process in which it showed."""

    exit_code = ExitCode.INTERNAL

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


class VerdictError(DistcheckError, AssertionError):
    """Raised by `Report.raise_for_verdict()`; its text is the report's failing part."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code
