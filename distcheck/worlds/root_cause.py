"""How each rank of a world ended, and who is to blame: causes first, victims after."""

import os
import re
import signal
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from distcheck.errors.defects import is_of_a_program, place_of
from distcheck.errors.masking import masked
from distcheck.records import Outcome
from distcheck.records.exit_status import MISUSES, SECONDARY_FAILURE, RankEnd
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

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)
_PYTHONS = os.path.dirname(os.__file__)
SIZES_DIFFER = "collective mismatch"  # gloo's own words, on the rank that received
Known = dict[str, Any]  # fields of an Outcome

_STOPPED = "stopped (state T), as SIGSTOP does, and so did not answer"
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
    if raised is None or not raised.defect or is_secondary(child) or child.proven is not None:
        return False
    return is_of_a_program(raised.kind)


def _in_order(children: Sequence[Child], *, hung: bool) -> list[tuple[Outcome, Child]]:
    judged = [(_outcome(child, rank, hung=hung), child) for rank, child in enumerate(children)]
    return sorted(judged, key=lambda pair: _order(*pair))


def is_secondary(child: Child) -> bool:
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
        told = None  # what it entered once it was woken is not what it hung in
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
    """Where a rank was, what it printed, and what its backend and its world said."""
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
    """A rank of a world that is proven to go no further; or of a simulated one whose process ended,
    or was ended, while another rank had its turn.
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
    """Why the world could go no further, or failed; or nothing."""
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
    if finished(child, hung=hung):
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
        # Where it hung is what was written first: once woken, it is somewhere else.
        stacks = None if woken and child.shaken else child.stacks
        known = _of_stacks(stacks) or {"text": _without_plumbing(child.low_level_stacks)}
        return {"outcome": ends, "ended_by": _went_on(child) if woken else "", **known}
    if child.ended and killed:
        return {"outcome": ends, "silence": "no answer", "ended_by": _NO_ANSWER}
    if child.exit_signal is not None:
        hint = "; the kernel's out-of-memory killer does that, and so does kill -9"
        name = _signal_name(child.exit_signal) + (hint if child.exit_signal == 9 else "")
        return {"outcome": RankEnd.KILLED, "ended_by": f"killed by {name}"}
    after = " after its last step" if child.done is not None else " without a word"
    left = f"left with exit code {child.exit_code}{after}"
    # Its stack is of where it has called os._exit.
    return {"outcome": RankEnd.EXITED, "ended_by": left, **_of_stacks(child.stacks)}


def _of_raised(child: Child, raised: messages.Raised) -> Known:
    text = raised.traceback.rstrip("\n")
    if _in_own_code(child):
        text += f"\nraised in {place_of(raised.defect)}: {_OWN_CODE}"
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
    own = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "distcheck", "")
    frames = _FRAME.findall(raised.traceback)
    places = [f"{p}:{line}" for p, line in frames if "/torch/" not in p and not p.startswith(own)]
    at = places[-1] if places else ""
    if (call := raised.collective) is None:
        return f" at {at}" if at else ""
    said = call.in_words(unfinished=False, place=call.place != at)
    return f"{f' at {at}' if at else ''} (last collective: {said})"


def _innermost(stacks: str) -> str:
    """FILE:LINE, the innermost of a stack that is not in Python's own modules; or nothing."""
    frames = _FRAME.findall(stacks)
    own = [f for f in frames if not f[0].startswith(_PYTHONS) or "-packages" in f[0]] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


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
    return f"its output{f' (last 20{of} lines)' if len(lines) > 20 else ''}:\n{shown}"
