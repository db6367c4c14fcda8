"""How each rank of a world ended, and who is to blame: causes first, victims after."""

import os
import re
import signal
from collections.abc import Sequence
from itertools import takewhile

from distcheck.errors.defects import is_of_a_program, place_of
from distcheck.errors.masking import masked
from distcheck.records import Outcome
from distcheck.records.ends import MISUSES, PROVEN, STOPPED, VICTIM, RankEnd
from distcheck.worlds import messages
from distcheck.worlds.local.children import Child

# What gloo and NCCL say on the ranks that are left when another one has gone.
_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|peer closed|"
    r"connectFullMesh|Connection was likely closed|"
    r"remote process exited|ncclRemoteError|NCCL communicator was aborted",
    re.IGNORECASE,
)
# What a collective that timed out raises; a process or a request of one's own may time out, too.
_COLLECTIVES_ERRORS = {
    "RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError",
}  # fmt: skip

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)

_STOPPED = f"{STOPPED}, as SIGSTOP does, and so did not answer"
_OWN_CODE = "distcheck fell over what the code under test left behind, or over itself"
_NO_ANSWER = "did not answer when it was asked what it was doing"

# Below it, in faulthandler's order, is the life of the process that forked this one.
_FORKED = os.path.join("distcheck", "worlds", "local", "child.py") + '", line'


def finished(child: Child, *, hung: bool) -> bool:
    """Whether a rank did its job and then left in peace, exit status included; where the world
    `hung`, without having been asked first.
    """
    left = child.done is not None and child.gone and child.released and child.exit_code == 0
    return left and not (hung and child.late)


def outcomes(children: Sequence[Child], *, hung: bool) -> list[Outcome]:
    """How each rank ended, the original cause first and ranks that finished last.

    A rank that died without a word outranks ranks that raised because they lost a peer; among
    ranks that raised on their own account the earliest comes first, and among ranks that hung
    those that are in no collective.
    """
    return [outcome for outcome, _ in _in_order(children, hung=hung)]


def first_cause(children: Sequence[Child], *, hung: bool) -> Child:
    """The rank whose end is the original cause, of those that did not finish."""
    return _in_order(children, hung=hung)[0][1]


def own_defect(children: Sequence[Child], *, hung: bool) -> messages.Raised | None:
    """What ended a world, if only code of distcheck and its libraries is in the traceback, and it
    is neither a lost peer nor trouble of the machine. It is a defect of distcheck where no code of
    others had run in that rank, which may have left behind what distcheck fell over.
    """
    child = first_cause(children, hung=hung)
    ended = _outcome(child, 0, hung=hung).outcome
    return child.raised if ended == RankEnd.RAISED and _in_own_code(child) else None


def _in_own_code(child: Child) -> bool:
    raised = child.raised
    if raised is None or not raised.defect or is_victim(child) or child.proven is not None:
        return False
    return is_of_a_program(raised.kind)


def _in_order(children: Sequence[Child], *, hung: bool) -> list[tuple[Outcome, Child]]:
    judged = [(_outcome(child, rank, hung=hung), child) for rank, child in enumerate(children)]
    return sorted(judged, key=lambda pair: _order(*pair))


def is_victim(child: Child) -> bool:
    """Whether a rank raised only because a peer was gone."""
    if child.raised is None:
        return False
    timed_out = "timed out" in child.raised.message.lower()
    if timed_out and child.raised.kind in _COLLECTIVES_ERRORS:
        return True
    return bool(_LOST_PEER.search(child.raised.message))


def _outlived_its_peers(child: Child) -> bool:
    """Whether what ended a rank is that distcheck ended its world. Ranks are killed one after
    another, and on a busy machine one that is left loses its peers first: it raises of that, or
    the library that it waits in aborts it. What it was in is what it had said before.
    """
    asked = child.stacks is not None or child.ended
    lost = is_victim(child) if child.raised is not None else child.exit_signal is not None
    return child.cut_short and asked and lost


def _order(outcome: Outcome, child: Child) -> tuple[int, float, int]:
    at = child.raised.at if child.raised is not None else 0.0
    if outcome.outcome == RankEnd.RAISED:
        return (VICTIM if is_victim(child) else outcome.outcome.place, at, outcome.rank)
    waits = child.stacks is not None and "not finished" in child.stacks.collective
    first = -1.0 if child.stopped else float(waits and not child.woken)
    return (outcome.outcome.place, first, outcome.rank)


def _outcome(child: Child, rank: int, *, hung: bool) -> Outcome:
    name, detail = _classify(child, hung=hung)
    said = child.stacks if _outlived_its_peers(child) else None
    told = said or child.raised or child.stacks
    if hung and child.woken:
        told = None  # what it entered once it was woken is not what it hung in
    return Outcome(
        rank=rank,
        outcome=name,
        detail=masked(detail.strip()),
        collectives=() if told is None else told.collectives,
    )


def _classify(child: Child, *, hung: bool) -> tuple[RankEnd, str]:
    return _of_proven(child, hung=hung) or _of_process(child, hung=hung)


def _of_proven(child: Child, *, hung: bool) -> tuple[RankEnd, str] | None:
    """A rank of a world that is proven to go no further; or of a simulated one whose process ended,
    or was ended, while another rank had its turn.
    """
    if child.raised is not None or child.done is not None or child.stacks is None:
        return None
    if child.stacks.waits_for_turn:
        return RankEnd.ENDED, f"{_where(child)}\n{child.stacks.text}{_output(child)}"
    if child.proven is None or not hung:
        return None
    last = f"\nlast collective: {child.stacks.collective}" if child.stacks.collective else ""
    text = f"{_where(child)}{_why(child)}{last}\n{child.stacks.text}{_output(child)}"
    return (RankEnd.RAISED if child.proven.how in MISUSES else RankEnd.HUNG), text


def _why(child: Child) -> str:
    """Why the world could go no further, or failed, in a line of its own; or nothing."""
    if child.proven is None:
        return ""
    return f"\n{PROVEN[child.proven.how]}: {child.proven.what}"


def _of_process(child: Child, *, hung: bool) -> tuple[RankEnd, str]:
    where = _where(child)
    if child.spawn_error:
        return RankEnd.EXITED, f"could not be started: {child.spawn_error}"
    if child.lost:
        at = "" if child.progress is None else "at "
        return RankEnd.LOST, f"last heard of {at}{where}\n{child.lost}{_output(child)}"
    outlived = _outlived_its_peers(child)
    if child.raised is not None and not outlived and not (hung and child.woken):
        collective = f"\nlast collective: {child.raised.collective}"
        text = child.raised.traceback + (collective if child.raised.collective else "")
        if _in_own_code(child):
            text += f"\nraised in {place_of(child.raised.defect)}: {_OWN_CODE}"
        victim = f"; its peer was gone{_lost_at(child.raised)}" if is_victim(child) else ""
        return RankEnd.RAISED, f"{where}{victim}{_why(child)}\n{text}{_output(child)}"
    if finished(child, hung=hung):
        return RankEnd.FINISHED, ""
    died = child.exit_signal not in (None, signal.SIGKILL)
    if died and child.done is None and child.stacks is None and not child.shaken:
        name = _signal_name(child.exit_signal)
        stack = _without_plumbing(child.low_level_stacks)
        why = _why(child)
        return RankEnd.KILLED, f"{where}{why}\nkilled by {name}{_output(child)}\n{stack}"
    if child.stopped and child.exit_signal == signal.SIGKILL:
        return (RankEnd.HUNG if hung else RankEnd.ENDED), f"{where}\n{_STOPPED}{_output(child)}"
    asked = child.stacks is not None or "most recent call first" in child.low_level_stacks
    answered_late = child.woken and not (outlived and child.raised is not None)
    woken = hung and (child.late or answered_late)
    killed = outlived or child.exit_signal == signal.SIGKILL
    if woken or (asked and (killed or (died and child.shaken))):
        # Where it hung is what was written first: once woken, it is somewhere else.
        told = None if woken and child.shaken else child.stacks
        stacks = told.text if told else _without_plumbing(child.low_level_stacks)
        last = f"\nlast collective: {told.collective}" if told and told.collective else ""
        went_on = f"\n{_went_on(child)}" if woken else ""
        text = f"{where}{went_on}{last}\n{stacks}{_output(child)}"
        return (RankEnd.HUNG if hung else RankEnd.ENDED), text
    if child.ended and killed:
        text = f"{where}\n{_NO_ANSWER}{_output(child)}"
        return (RankEnd.HUNG if hung else RankEnd.ENDED), text
    if child.exit_signal is not None:
        hint = "; the kernel's out-of-memory killer does that, and so does kill -9"
        name = _signal_name(child.exit_signal) + (hint if child.exit_signal == 9 else "")
        return RankEnd.KILLED, f"{where}\nkilled by {name}{_output(child)}"
    after = " after its last step" if child.done is not None else " without a word"
    told = child.stacks  # where it has called os._exit
    last = f"\nlast collective: {told.collective}" if told and told.collective else ""
    stack = f"\n{told.text.rstrip()}" if told else ""
    left = f"left with exit code {child.exit_code}{after}{last}{stack}"
    return RankEnd.EXITED, f"{where}\n{left}{_output(child)}"


def _went_on(child: Child) -> str:
    if child.raised is not None:
        return (
            "went on when it was asked, after the deadline, and raised "
            f"{child.raised.kind}: {child.raised.message}"
        )
    if child.late:
        return "went on when it was asked, after the deadline"
    return "answered only after a signal, which can wake a rank; it was here before"


def _lost_at(raised: messages.Raised) -> str:
    """Where a rank was when it lost its peer. Whether its last collective had completed is not
    known: gloo says so of one that has failed, too.
    """
    frames = _FRAME.findall(raised.traceback)
    own = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "distcheck", "")
    places = [f"{p}:{line}" for p, line in frames if "/torch/" not in p and not p.startswith(own)]
    at = f" at {places[-1]}" if places else ""
    collective = raised.collective.replace(", not finished", "").removesuffix(at)
    return at + (f" (last collective: {collective})" if collective else "")


def _without_plumbing(stacks: str) -> str:
    """What faulthandler wrote, less distcheck's own frames and threads that only wait for us."""
    own = os.path.dirname(os.path.dirname(__file__))
    blocks = []
    for block in stacks.split("\n\n"):
        lines = list(takewhile(lambda line: _FORKED not in line, block.splitlines()))
        lines = [line for line in lines if own not in line and "<string>" not in line]
        frames = [line for line in lines if line.lstrip().startswith("File ")]
        waits = bool(frames) and all("/threading.py" in frame for frame in frames)
        idle = bool(lines) and lines[0].startswith("Thread ") and not frames  # of ours alone
        if lines and not waits and not idle and not lines[0].startswith("Extension modules"):
            blocks.append("\n".join(lines))
    return "\n".join(blocks)


def _where(child: Child) -> str:
    if child.progress is None:
        return "before the first step"
    return f"step {child.progress.step}, {child.progress.phase}"


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def _output(child: Child) -> str:
    text = child.output.strip()
    if not text:
        return ""
    lines = text.splitlines()
    shown = "\n".join(lines[-20:])
    of = f" of {len(lines)}" if not child.output_left_out else ""
    return f"\nits output{f' (last 20{of} lines)' if len(lines) > 20 else ''}:\n{shown}"
