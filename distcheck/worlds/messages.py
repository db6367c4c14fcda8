"""Messages between front end, helper and children; `framing.py` encodes them.

front end -> helper    Spawn (with the child's file descriptors), Signal
helper -> front end    Ready; Spawned and Exited about a child, wrapped in RoutedEvent
child -> front end     Progress, UserMessage, Done, Raised, Stacks, Blocked, Unblocked; over a pipe

Messages from ranks without a pipe to the front end are also wrapped in RoutedEvent. They come from
the child that runs a simulated world, which also sends Proven and Remarked for the whole world, or
from another machine (`remote/protocol.py`).
"""

import time

import msgspec

from distcheck.records import Collective
from distcheck.records.posted_calls import PostedCall
from distcheck.worlds.call_log import LoggedCall

SETTING_UP = "set up"  # the phase in which an engine is built, which may compile extensions first
LOADING = "load"  # the phase in which a rank imports strategy and workload


class Spawn(msgspec.Struct, tag=True):
    """Fork a child that calls `target` ("module:function") with `payload`.

    File descriptors travel with the message: events, output, stacks, release, dump; then those of
    the job, named `given`; then those whose numbers go into the variables `fd_names`. `path`, `cwd`
    and `env` are the front end's. The helper imports `imports` first, once for all children:
    modules of distcheck that other children needed, and torch's compiler.
    """

    key: int
    target: str
    payload: bytes
    cwd: str
    path: list[str]
    env: dict[str, str]
    given: list[str] = []
    fd_names: list[str] = []
    imports: list[str] = []


class Signal(msgspec.Struct, tag=True):
    """Send a signal to a child, if it is still running."""

    key: int
    signal: int


class Ready(msgspec.Struct, tag=True):
    """The helper has imported the modules that its children need, or has failed with `error`."""

    torch_version: str
    error: str = ""


class Spawned(msgspec.Struct, tag=True):
    """A child was forked, or forking failed with `error`."""

    pid: int
    error: str = ""


class Exited(msgspec.Struct, tag=True):
    """A child has exited: its exit code, or the signal that killed it. For a child on another
    machine, also faulthandler's output and the logged calls.
    """

    code: int | None
    signal: int | None = None
    stacks: str = ""
    called: list[LoggedCall] = []


class Progress(msgspec.Struct, tag=True):
    """A child entered a phase of a step."""

    step: int
    phase: str


class UserMessage(msgspec.Struct, tag=True):
    """A payload for the front end, in a format that only the child's job defines."""

    payload: bytes


class Done(msgspec.Struct, tag=True):
    """The job of a child returned. `imported` lists the modules of distcheck that the child had to
    import, and torch's compiler if it uses that.
    """

    payload: bytes
    imported: list[str] = []


class Raised(msgspec.Struct, tag=True):
    """The job of a child raised. `at` is a time of the monotonic clock, which all processes of a
    machine share. `exit_code` is set for errors addressed to the user (`DistcheckError`). `defect`
    is the full traceback if it contains only code of distcheck and its libraries. `within_call` is
    True if the exception came from the call of torch.distributed that the rank waited for.
    """

    kind: str
    message: str
    traceback: str
    at: float
    exit_code: int | None = None
    collective: Collective | None = None
    collectives: tuple[Collective, ...] = ()
    defect: str = ""
    within_call: bool = False


class Stacks(msgspec.Struct, tag=True):
    """Position of a child when it was asked: its Python stacks, and its last collective."""

    text: str
    collective: Collective | None
    collectives: tuple[Collective, ...] = ()
    waits_for_turn: bool = False  # in a simulated world, in which one rank runs at a time

    @property
    def waits_in_call(self) -> bool:
        """True if the last collective had not completed."""
        return self.collective is not None and not self.collective.finished


class Printed(msgspec.Struct, tag=True):
    """Output of a rank that has no output pipe to this process."""

    data: bytes


class Blocked(msgspec.Struct, tag=True, kw_only=True):
    """A rank reports that it is blocked: it waits for its calls `on` (indices into `calls`; certain
    if there is only one), or its job is `over`.

    `calls` are its latest calls. `posted` is the number of its latest collective in each group, and
    `ranks` the ranks of its groups. `messages` are the numbers of its sends and receives by (group,
    kind, peer, tag); a peer of -1 means any rank. `received` are the numbers of its completed
    receives by (group, tag). `alone` is True if no other Python thread could post a call. `ran_ns`
    is the run time of its main thread; it is set if that thread does not retract the report before
    it continues.
    """

    on: tuple[int, ...] = ()
    over: bool = False
    alone: bool = True
    calls: list[PostedCall] = []
    posted: dict[str, int] = {}
    ranks: dict[str, tuple[int, ...]] = {}
    messages: list[tuple[str, str, int, int, int]] = []
    received: list[tuple[str, int, int]] = []
    ran_ns: int = 0


class Unblocked(msgspec.Struct, tag=True):
    """A rank retracts its report that it is blocked."""


class Remarked(msgspec.Struct, tag=True):
    """A warning about a simulated world: its `name`, and its message."""

    name: str
    text: str


class Proven(msgspec.Struct, tag=True):
    """A world cannot proceed, because of a "mismatch" of calls, a "deadlock", or an operation that
    cannot be simulated ("refused"). `what` explains the reason in one sentence.
    """

    how: str
    what: str


ChildEvent = (
    Spawned
    | Progress
    | UserMessage
    | Printed
    | Done
    | Raised
    | Stacks
    | Blocked
    | Unblocked
    | Exited
)


class RoutedEvent(msgspec.Struct, tag=True):
    """An event of a child or rank. `key` is the key of the child or the number of the rank. For a
    rank on another machine, `world` is the number of its world, and the event is `age_s` seconds
    old (clocks of two machines cannot be compared).
    """

    key: int
    event: ChildEvent
    world: int = 0
    age_s: float = 0.0


Request = Spawn | Signal
Notice = Ready | RoutedEvent
# Messages through a child's pipe.
Event = (
    Progress
    | UserMessage
    | Done
    | Raised
    | Stacks
    | Blocked
    | Unblocked
    | RoutedEvent
    | Proven
    | Remarked
)
AnyEvent = Event | ChildEvent


def corrupted_pipe_event() -> Raised:
    """Return the event that replaces the messages of a child whose pipe contained invalid data."""
    text = (
        "distcheck's internal pipe has data that distcheck did not write: the code wrote to a "
        "descriptor that it had not opened"
    )
    return Raised("ProtocolError", text, text, time.monotonic())


def exception_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:  # raised by user code
        return f"(its text is not available: {type(another).__name__})"


def printable(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded."""
    return text.encode(errors="backslashreplace").decode()
