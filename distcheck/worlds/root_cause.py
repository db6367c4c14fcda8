"""Determines the exit status of each rank, and orders root causes before secondary failures."""

import os
import re
import signal
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from distcheck.errors.defects import innermost_own_place, is_programming_error
from distcheck.errors.masking import masked
from distcheck.records import Outcome
from distcheck.records.exit_status import MISUSES, SECONDARY_FAILURE, RankEnd
from distcheck.worlds import messages
from distcheck.worlds.local.children import Child

# Errors that gloo and NCCL raise on the remaining ranks when a peer has exited.
_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|peer closed|"
    r"connectFullMesh|Connection was likely closed|"
    r"remote process exited|ncclRemoteError|NCCL communicator was aborted",
    re.IGNORECASE,
)
# Raised by a collective that times out; a process or request of the user may time out as well.
_COLLECTIVES_ERRORS = {
    "RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError",
}  # fmt: skip

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)
_PYTHONS = os.path.dirname(os.__file__)
SIZES_DIFFER = "collective mismatch"  # gloo's message on the receiving rank
Known = dict[str, Any]  # fields of an Outcome

_STOPPED = "stopped (state T, SIGSTOP), so it did not respond"
_OWN_CODE = "an internal error of distcheck, possibly caused by state that the code under test left"
_NO_ANSWER = "did not respond to a request for its stack"

# Frames below this one, in faulthandler's order, belong to the process that forked this one.
_FORKED = os.path.join("distcheck", "worlds", "local", "child.py") + '", line'


def has_finished(child: Child, *, hung: bool) -> bool:
    """Return True if a rank completed its job and, after it was released, exited with status 0. If
    the world `hung`, a rank that was asked for its stacks first does not count.
    """
    left = child.done is not None and child.gone and child.released and child.exit_code == 0
    return left and not (hung and child.late)


def rank_outcomes(children: Sequence[Child], *, hung: bool) -> list[Outcome]:
    """Return how each rank ended; the root cause comes first and finished ranks last.

    A rank that died without a message comes before ranks that raised because they lost a peer.
    Ranks that raised for other reasons are ordered by time. Among hung ranks, those outside a
    collective come first.
    """
    return [outcome for outcome, _ in _in_order(children, hung=hung)]


def first_cause(children: Sequence[Child], *, hung: bool) -> Child:
    """Return the unfinished rank that is the root cause."""
    return _in_order(children, hung=hung)[0][1]


def own_defect(children: Sequence[Child], *, hung: bool) -> messages.Raised | None:
    """Return the exception that ended a world, if it is a defect of distcheck: its traceback
    contains only code of distcheck and its libraries, and it is neither a lost peer nor a problem
    of the machine. If third-party code had already run in that rank, that code may have corrupted
    the rank's state instead.
    """
    child = first_cause(children, hung=hung)
    ended = _outcome(child, 0, hung=hung).outcome
    return child.raised if ended == RankEnd.RAISED and _in_own_code(child) else None


def _in_own_code(child: Child) -> bool:
    raised = child.raised
    if raised is None or not raised.defect or is_secondary(child) or child.proven is not None:
        return False
    return is_programming_error(raised.kind)


def _in_order(children: Sequence[Child], *, hung: bool) -> list[tuple[Outcome, Child]]:
    judged = [(_outcome(child, rank, hung=hung), child) for rank, child in enumerate(children)]
    return sorted(judged, key=lambda pair: _order(*pair))


def is_lost_peer(error: str) -> bool:
    """Return True if `error` ("KIND: MESSAGE") is the message of gloo or NCCL that a peer has
    exited.
    """
    kind, _, message = error.partition(": ")
    of_backend = kind in _COLLECTIVES_ERRORS and re.search("gloo|nccl", message, re.IGNORECASE)
    return bool(of_backend and _LOST_PEER.search(message))


def is_secondary(child: Child) -> bool:
    """Return True if a rank raised only because a peer had exited."""
    if child.raised is None:
        return False
    timed_out = "timed out" in child.raised.message.lower()
    if timed_out and child.raised.kind in _COLLECTIVES_ERRORS:
        return True
    return bool(_LOST_PEER.search(child.raised.message))


def _outlived_its_peers(child: Child) -> bool:
    """Return True if a rank ended only because distcheck ended its world.

    Ranks are killed one after another. On a busy machine, a remaining rank notices that it has lost
    its peers and raises, or its library aborts it. The position that it had reported before is then
    the relevant one.
    """
    asked = child.stacks is not None or child.ended
    lost = is_secondary(child) if child.raised is not None else child.exit_signal is not None
    return child.cut_short and asked and lost


def _order(outcome: Outcome, child: Child) -> tuple[int, float, int]:
    at = child.raised.at if child.raised is not None else 0.0
    if outcome.outcome == RankEnd.RAISED:
        return (
            SECONDARY_FAILURE if is_secondary(child) else outcome.outcome.place,
            at,
            outcome.rank,
        )
    waits = child.stacks is not None and child.stacks.waits_in_call
    first = -1.0 if child.stopped else float(waits and not child.woken)
    return (outcome.outcome.place, first, outcome.rank)


def _outcome(child: Child, rank: int, *, hung: bool) -> Outcome:
    known = _of_proven(child, hung=hung) or _of_process(child, hung=hung)
    said = child.stacks if _outlived_its_peers(child) else None
    told = said or child.raised or child.stacks
    if hung and child.woken:
        told = None  # calls entered after it was woken are not those that it hung in
    end = RankEnd(known.pop("outcome"))
    known |= {} if end == RankEnd.FINISHED else _of_any_end(child)
    texts = {name: masked(value) for name, value in known.items() if isinstance(value, str)}
    return Outcome(
        rank=rank,
        outcome=end,
        collectives=() if told is None else told.collectives,
        **{**known, **texts},
    )


def _of_any_end(child: Child) -> Known:
    """Return a rank's position, its output, and True if gloo reports different message sizes."""
    step, phase = None, "before the first step"
    if child.spawn_error:
        phase = ""
    elif child.progress is not None:
        step, phase = child.progress.step, child.progress.phase
    seen = (child.output, "" if child.raised is None else child.raised.traceback)
    return {
        "step": step,
        "phase": phase,
        "output": "" if child.spawn_error else _output(child),
        "sizes_differ": any(SIZES_DIFFER in text for text in seen),
    }


def _of_proven(child: Child, *, hung: bool) -> Known | None:
    """Return the outcome of a rank whose world is proven to be deadlocked, or of a simulated rank
    whose process ended while another rank was running; None in other cases.
    """
    if child.raised is not None or child.done is not None or child.stacks is None:
        return None
    if child.stacks.waits_for_turn:
        text = child.stacks.text
        return {"outcome": RankEnd.ENDED, "silence": "no turn", "text": text}
    if child.proven is None or not hung:
        return None
    end = RankEnd.RAISED if child.proven.how in MISUSES else RankEnd.HUNG
    return {"outcome": end, **_why(child), **_of_stacks(child.stacks)}


def _why(child: Child) -> Known:
    """Return the reason why the world failed or could not proceed, as far as it is proven."""
    return {} if child.proven is None else {"proven": child.proven.how, "why": child.proven.what}


def _of_stacks(said: messages.Stacks | None) -> Known:
    if said is None:
        return {}
    return {"call": said.collective, "text": said.text, "place": _innermost(said.text)}


def _of_process(child: Child, *, hung: bool) -> Known:
    if child.spawn_error:
        why = f"could not be started: {child.spawn_error}"
        return {"outcome": RankEnd.EXITED, "ended_by": why}
    if child.lost:
        return {"outcome": RankEnd.LOST, "ended_by": child.lost}
    outlived = _outlived_its_peers(child)
    if child.raised is not None and not outlived and not (hung and child.woken):
        return _of_raised(child, child.raised)
    if has_finished(child, hung=hung):
        return {"outcome": RankEnd.FINISHED}
    ends = RankEnd.HUNG if hung else RankEnd.ENDED
    died = child.exit_signal not in (None, signal.SIGKILL)
    if died and child.done is None and child.stacks is None and not child.shaken:
        name = _signal_name(child.exit_signal)
        stack = _without_plumbing(child.low_level_stacks)
        by = f"killed by {name}"
        return {"outcome": RankEnd.KILLED, **_why(child), "ended_by": by, "text": stack}
    if child.stopped and child.exit_signal == signal.SIGKILL:
        return {"outcome": ends, "silence": "stopped", "ended_by": _STOPPED}
    asked = child.stacks is not None or "most recent call first" in child.low_level_stacks
    answered_late = child.woken and not (outlived and child.raised is not None)
    woken = hung and (child.late or answered_late)
    killed = outlived or child.exit_signal == signal.SIGKILL
    if woken or (asked and (killed or (died and child.shaken))):
        # The stacks written first show where it hung: once woken, the rank is somewhere else.
        stacks = None if woken and child.shaken else child.stacks
        known = _of_stacks(stacks) or {"text": _without_plumbing(child.low_level_stacks)}
        return {"outcome": ends, "ended_by": _describe_resumed(child) if woken else "", **known}
    if child.ended and killed:
        return {"outcome": ends, "silence": "no answer", "ended_by": _NO_ANSWER}
    if child.exit_signal is not None:
        hint = ", sent by the kernel's out-of-memory killer or by kill -9"
        name = _signal_name(child.exit_signal) + (hint if child.exit_signal == 9 else "")
        return {"outcome": RankEnd.KILLED, "ended_by": f"killed by {name}"}
    after = " after its last step" if child.done is not None else " without an error message"
    left = f"exited with code {child.exit_code}{after}"
    # The stack shows the call of os._exit.
    return {"outcome": RankEnd.EXITED, "ended_by": left, **_of_stacks(child.stacks)}


def _of_raised(child: Child, raised: messages.Raised) -> Known:
    text = raised.traceback.rstrip("\n")
    if _in_own_code(child):
        text += f"\nraised in {innermost_own_place(raised.defect)}: {_OWN_CODE}"
    lost = is_secondary(child)
    return {
        "outcome": RankEnd.RAISED,
        **_why(child),
        "lost_peer": lost,
        "lost_at": _lost_at(raised) if lost else "",
        "error": f"{raised.kind}: {raised.message}".partition("\n")[0],
        "call": raised.collective,
        "text": text,
    }


def _describe_resumed(child: Child) -> str:
    if child.raised is not None:
        return (
            "resumed when its stack was requested, after the deadline, and raised "
            f"{child.raised.kind}: {child.raised.message}"
        )
    if child.late:
        return "resumed when its stack was requested, after the deadline"
    return "responded only after a signal, which can wake a rank; its position before the signal"


def _lost_at(raised: messages.Raised) -> str:
    """Return the position of a rank when it lost its peer. The state of its last collective is not
    included: gloo marks failed collectives as completed, so the state is unknown.
    """
    own = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "distcheck", "")
    frames = _FRAME.findall(raised.traceback)
    places = [f"{p}:{line}" for p, line in frames if "/torch/" not in p and not p.startswith(own)]
    at = places[-1] if places else ""
    if (call := raised.collective) is None:
        return f" at {at}" if at else ""
    said = call.in_words(unfinished=False, place=call.place != at)
    return f"{f' at {at}' if at else ''} (last collective: {said})"


def _innermost(stacks: str) -> str:
    """Return the innermost frame outside Python's own modules as FILE:LINE; empty if none."""
    frames = _FRAME.findall(stacks)
    own = [f for f in frames if not f[0].startswith(_PYTHONS) or "-packages" in f[0]] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def _without_plumbing(stacks: str) -> str:
    """Return faulthandler's output without distcheck's own frames and its waiting threads."""
    own = os.path.dirname(os.path.dirname(__file__))
    blocks = []
    for block in stacks.split("\n\n"):
        lines = list(takewhile(lambda line: _FORKED not in line, block.splitlines()))
        lines = [line for line in lines if own not in line and "<string>" not in line]
        frames = [line for line in lines if line.lstrip().startswith("File ")]
        waits = bool(frames) and all("/threading.py" in frame for frame in frames)
        idle = bool(lines) and lines[0].startswith("Thread ") and not frames  # of ours only
        if lines and not waits and not idle and not lines[0].startswith("Extension modules"):
            blocks.append("\n".join(lines))
    return "\n".join(blocks)


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
    if child.output_left_out:  # the first line may begin with a part of a secret
        lines = lines[1:] or lines
    shown = "\n".join(lines[-20:])
    of = f" of {len(lines)}" if not child.output_left_out else ""
    return f"its output{f' (last 20{of} lines)' if len(lines) > 20 else ''}:\n{shown}"
