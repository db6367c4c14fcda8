"""How a rank ended, told from what is known of it."""

import signal

import pytest

from distcheck.worlds import blame, messages
from distcheck.worlds.links import RemoteChild

_FRAMES = """  File "/x/mine.py", line 8, in sync
    mean(model)
  File "/x/mean.py", line 3, in mean
    dist.barrier()
  File "/y/torch/distributed/c10d_logger.py", line 9, in wrapper
    return func()
RuntimeError: Connection reset by peer
"""


@pytest.mark.parametrize(
    ("collective", "said"),
    [
        ("barrier of [], number 2, not finished at /x/mean.py:3", "barrier of [], number 2"),
        ("barrier of [], number 1 at /x/mine.py:5", "barrier of [], number 1 at /x/mine.py:5"),
        ("", ""),
    ],
)
def test_a_victim_says_where_it_was_when_it_lost_its_peer(collective: str, said: str) -> None:
    child = RemoteChild(gone=True, exit_code=1)
    child.take(messages.Raised("RuntimeError", "Connection reset", _FRAMES, 1.0, None, collective))
    first, *_ = blame.outcomes([child], hung=False)[0].detail.splitlines()
    last = f" (last collective: {said})" if said else ""
    assert first == f"before the first step; its peer was gone at /x/mean.py:3{last}"


@pytest.mark.parametrize(
    ("kind", "lost"),
    [("TimeoutExpired", False), ("DistBackendError", True), ("RuntimeError", True)],
)
def test_a_timeout_of_ones_own_is_no_lost_peer(kind: str, lost: bool) -> None:
    child = RemoteChild(gone=True, exit_code=1)
    child.take(messages.Raised(kind, "it timed out after 3 seconds", _FRAMES, 1.0, None))
    assert blame.is_victim(child) == lost


@pytest.mark.parametrize("left", [{"exit_code": 1}, {"exit_signal": signal.SIGKILL}])
@pytest.mark.parametrize("hung", [True, False])
def test_a_rank_that_outlives_its_peers_by_a_moment_hung_where_it_said(
    left: dict[str, int], hung: bool
) -> None:
    """Ranks are killed one after another, and the next one's collective then fails."""
    child = RemoteChild(gone=True, **left)
    child.take(messages.Stacks('File "mine.py", line 9 in sync', "all_reduce of [5], number 1"))
    child.take(messages.Raised("RuntimeError", "Connection reset by peer", _FRAMES, 1.0, None))
    assert blame.outcomes([child], hung=hung)[0].outcome == "raised"
    child.cut_short = True
    outcome = blame.outcomes([child], hung=hung)[0]
    assert outcome.outcome == ("hung" if hung else "ended")
    assert "line 9 in sync" in outcome.detail
    assert "Connection reset" not in outcome.detail
    child.take(messages.Raised("ValueError", "of its own", _FRAMES, 1.0, None))
    assert blame.outcomes([child], hung=hung)[0].outcome == "raised"


_SAID = 'Current thread 0x1 (most recent call first):\n  File "mine.py", line 3 in sync\n'


def test_a_rank_that_dies_of_being_shaken_was_hung() -> None:
    child = RemoteChild(gone=True, exit_signal=signal.SIGSEGV, heard_stacks=_SAID)
    assert blame.outcomes([child], hung=True)[0].outcome == "killed"
    child.shaken = True
    assert blame.outcomes([child], hung=True)[0].outcome == "hung"


@pytest.mark.parametrize("shaken", [False, True])
def test_a_rank_that_is_done_after_it_was_asked_was_hung(shaken: bool) -> None:
    child = RemoteChild(gone=True, exit_code=0, released=True, heard_stacks=_SAID, shaken=shaken)
    child.take(messages.Done(b""))
    assert blame.outcomes([child], hung=True)[0].outcome == ("hung" if shaken else "finished")
    child.take(messages.Stacks('File "mine.py", line 9 in later', ""))
    assert blame.outcomes([child], hung=True)[0].outcome == ("hung" if shaken else "finished")
    child.take(messages.Done(b""))
    outcome = blame.outcomes([child], hung=True)[0]
    assert outcome.outcome == "hung"
    assert ("line 3 in sync" if shaken else "line 9 in later") in outcome.detail
    assert "went on when it was asked" in outcome.detail
    assert blame.outcomes([child], hung=False)[0].outcome == "finished"
