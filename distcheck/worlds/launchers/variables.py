"""Detects RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set by hand or by a script (`env://`)."""

from collections.abc import Mapping

from distcheck.worlds.launchers import Launch, local_number, number, tcp

NAME = "RANK and WORLD_SIZE"


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Return a launch if all four variables are set; RANK without the others is ignored."""
    meeting = tcp(environ)
    if meeting is None or "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    if "TORCHELASTIC_RUN_ID" in environ:
        return None
    rank = number(environ, "RANK", launcher=NAME)
    return Launch(
        launcher=NAME,
        rank=rank,
        world=number(environ, "WORLD_SIZE", launcher=NAME),
        ranks_here=(rank,),
        local_rank=local_number(environ, "LOCAL_RANK", 0, launcher=NAME),
        local_world=local_number(environ, "LOCAL_WORLD_SIZE", 1, launcher=NAME),
        meeting=meeting,
        owned=False,
    )
