"""What front, helper and children say to each other; `framing.py` says how it travels.

front -> helper    Spawn (with the child's file descriptors), Signal
helper -> front    Ready; of a child Spawned and Exited, as Of
child -> front     Progress, Said, Done, Raised, Stacks, Waits and GoesOn, over a pipe of its own

Of ranks that have no pipe to the front the same is said as Of: by the child that holds a simulated
world, which says of them all Proven and Remarked; and by another machine, see `remote/protocol.py`.
"""

import time

import msgspec

from distcheck.records import Collective
from distcheck.records.posted_calls import Posted
from distcheck.worlds.call_log import Logged

SETTING_UP = "set up"  # the phase in which an engine is made, which may build extensions first
LOADING = "load"  # the phase in which a rank imports strategy and workload


class Spawn(msgspec.Struct, tag=True):
    """Fork a child that calls `target` ("module:function") with `payload`.

    The message carries file descriptors: events, output, stacks, release, dump, then the job's
    own, which are called `given`, then those whose numbers go into the variables `fd_names`.
    `path`, `cwd` and `env` are the front's. `imports` are distcheck's own modules that other
    children needed, and torch's compiler: the helper imports them first, once for all.
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
    """Send a signal to a child, if it is still there."""

    key: int
    signal: int


class Ready(msgspec.Struct, tag=True):
    """The helper has imported what its children need; or says why it could not."""

    torch_version: str
    error: str = ""


class Spawned(msgspec.Struct, tag=True):
    """A child was forked; or not, and why."""

    pid: int
    error: str = ""


class Exited(msgspec.Struct, tag=True):
    """A child is gone: its exit code, or the signal that killed it. Of one on another machine, also
    what faulthandler wrote there, and the calls that it logged.
    """

    code: int | None
    signal: int | None = None
    stacks: str = ""
    called: list[Logged] = []


class Progress(msgspec.Struct, tag=True):
    """A child entered a phase of a step."""

    step: int
    phase: str


class UserMessage(msgspec.Struct, tag=True):
    """A child tells the front something that only its own job understands."""

    payload: bytes


class Done(msgspec.Struct, tag=True):
    """A child's job returned. `imported` are the modules of distcheck that it had to import, and
    torch's compiler where it uses that.
    """

    payload: bytes
    imported: list[str] = []


class Raised(msgspec.Struct, tag=True):
    """A child's job raised. `at` is the monotonic clock, which all processes share.

    `exit_code` is set for errors that are meant for a person (`DistcheckError`), and `defect`
    is the whole traceback where no code but that of distcheck and its libraries is in it.
    `within_call` is whether a call of torch.distributed raised it that the rank waited for.
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
    """What a child was doing when it was asked: Python stacks, and its last collective."""

    text: str
    collective: Collective | None
    collectives: tuple[Collective, ...] = ()
    waits_for_turn: bool = False  # in a simulated world, where one rank runs at a time

    @property
    def waits_in_call(self) -> bool:
        """Whether its last collective had not completed."""
        return self.collective is not None and not self.collective.finished


class Printed(msgspec.Struct, tag=True):
    """A rank wrote to its output, which does not come through a pipe of its own."""

    data: bytes


class Waits(msgspec.Struct, tag=True, kw_only=True):
    """A rank cannot go on by itself: it waits for its calls `on` (places in `calls`), for one of
    which it waits for sure if there is only one; or its job is `over`.

    `calls` are its latest calls and `open_calls` the places of those that have not completed.
    `posted` is the number of its latest collective in each group, `ranks` has the ranks of its
    groups. `messages` are the numbers of its sends and receives by (group, kind, peer, tag), a
    peer of -1 being any rank, and `received` those of its receives that have completed, by (group,
    tag). `alone` is whether no other thread of Python's could post a call. `ran_ns` is how long its
    main thread had run, where that thread does not take its word back before it goes on.
    """

    on: tuple[int, ...] = ()
    over: bool = False
    alone: bool = True
    calls: list[Posted] = []
    open_calls: tuple[int, ...] = ()
    posted: dict[str, int] = {}
    ranks: dict[str, tuple[int, ...]] = {}
    messages: list[tuple[str, str, int, int, int]] = []
    received: list[tuple[str, int, int]] = []
    ran_ns: int = 0


class GoesOn(msgspec.Struct, tag=True):
    """A rank that had said that it waits does not wait any more."""


class Remarked(msgspec.Struct, tag=True):
    """What a simulated world has seen and does not fail for: its `name`, and a sentence."""

    name: str
    text: str


class Proven(msgspec.Struct, tag=True):
    """A world can go no further: by a "mismatch" of calls, by a "deadlock", or because
    what it does cannot be simulated ("refused"); `what` says it in a sentence.
    """

    how: str
    what: str


ChildEvent = (
    Spawned | Progress | UserMessage | Printed | Done | Raised | Stacks | Waits | GoesOn | Exited
)


class Of(msgspec.Struct, tag=True):
    """What a child or a rank says, or is said of it. `key` is a child's, or the number of a rank;
    of a rank on another machine, `world` numbers its world, and it was said `age_s` ago: clocks of
    two machines have nothing in common.
    """

    key: int
    event: ChildEvent
    world: int = 0
    age_s: float = 0.0


Request = Spawn | Signal
Notice = Ready | Of
# What comes through a child's pipe.
Event = Progress | UserMessage | Done | Raised | Stacks | Waits | GoesOn | Of | Proven | Remarked
AnyEvent = Event | ChildEvent


def garbled() -> Raised:
    """What stands for the end of a child that can no longer be understood."""
    text = (
        "distcheck's own pipe holds something that it did not write: the code wrote to a "
        "descriptor that it had not opened"
    )
    return Raised("ProtocolError", text, text, time.monotonic())


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:  # theirs
        return f"(its text cannot be had: {type(another).__name__})"


def printable(text: str) -> str:
    """Text without lone surrogates, which can be sent and written nowhere."""
    return text.encode(errors="backslashreplace").decode()
