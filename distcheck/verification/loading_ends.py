"""A process that is lost while it loads a strategy and a workload: code that exits, hangs, stops or
crashes when it is imported.
"""

import re
import signal
from pathlib import Path

from distcheck.errors import CannotRunError, DistcheckError, UsageError
from distcheck.worlds.local.children import Child
from distcheck.worlds.world import World

_OWN = str(Path(__file__).parents[1])
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_BY_THE_KERNEL = "the kernel does that where memory is short, and so does kill -9"


def why_not_loaded(world: World, *, deadline_s: float) -> DistcheckError | None:
    """Why a world of one process that is over has neither an answer nor an error; None where it
    has one of these.
    """
    child = world.children[0]
    if child.done is not None or child.raised is not None or child.spawn_error or child.lost:
        return None
    loaded = child.progress.phase if child.progress is not None else "the strategy"
    killed = child.exit_signal == signal.SIGKILL
    if child.stopped:
        how = "was stopped (state T), as SIGSTOP does"
    elif world.hung:
        how = f"hung: it did nothing for {deadline_s:g} s{_where(child)}"
    elif child.exit_signal is not None:
        how = f"was killed by {signal.Signals(child.exit_signal).name}{_where(child)}"
    else:
        how = f"left with exit code {child.exit_code}{_where(child)}"
    said = f"the process that loads {loaded} {how}"
    if killed and not world.hung:
        return CannotRunError(f"{said}: {_BY_THE_KERNEL}")
    return UsageError(f"{said}; loading must end and leave the process as it is")


def _where(child: Child) -> str:
    """The innermost place that it was at, as far as it could say."""
    text = child.stacks.text if child.stacks is not None else ""
    crashed = child.low_level_stacks.rpartition("Current thread")[2]
    low = [one for one in _PLACE.findall(crashed) if not one[0].startswith(_OWN)]
    places = _PLACE.findall(text)[-1:] or low[:1]  # innermost last, and first
    return f" at {places[0][0]}:{places[0][1]}" if places else ""
