"""Detects torchrun, by RANK, WORLD_SIZE and TORCHELASTIC_*. Its TCPStore is at MASTER_ADDR."""

from collections.abc import Mapping

from distcheck.errors import CannotRunError
from distcheck.worlds.launchers import Launch, optional_integer, required_integer, tcp_address

NAME = "torchrun"


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that torchrun's variables describe; None if torchrun did not start this
    process.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    rank = required_integer(environ, "RANK", launcher=NAME)
    meeting = tcp_address(environ)
    if meeting is None:
        raise CannotRunError("torchrun has started this process without MASTER_ADDR, MASTER_PORT")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        meeting = meeting.replace("tcp://", "store://")
    return Launch(
        launcher=NAME,
        rank=rank,
        world=required_integer(environ, "WORLD_SIZE", launcher=NAME),
        ranks_here=(rank,),
        local_rank=optional_integer(environ, "LOCAL_RANK", 0, launcher=NAME),
        local_world=optional_integer(environ, "LOCAL_WORLD_SIZE", 1, launcher=NAME),
        meeting=meeting,
        restarts=optional_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0, launcher=NAME),
        run=environ["TORCHELASTIC_RUN_ID"],
    )
