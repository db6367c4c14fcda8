"""Detects RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set by hand or by a script (`env://`)."""

from collections.abc import Mapping

from distcheck.worlds.launchers import Launch, optional_integer, required_integer, tcp_address

NAME = "RANK and WORLD_SIZE"


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Return a launch if all four variables are set; RANK without the others is ignored."""
    meeting = tcp_address(environ)
    if meeting is None or "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    if "TORCHELASTIC_RUN_ID" in environ:
        return None
    rank = required_integer(environ, "RANK", launcher=NAME)
    return Launch(
        launcher=NAME,
        rank=rank,
        world=required_integer(environ, "WORLD_SIZE", launcher=NAME),
        ranks_here=(rank,),
        local_rank=optional_integer(environ, "LOCAL_RANK", 0, launcher=NAME),
        local_world=optional_integer(environ, "LOCAL_WORLD_SIZE", 1, launcher=NAME),
        meeting=meeting,
        owned=False,
    )
