"""The job that reads a data set, as it is asked for. No torch."""

import msgspec

from distcheck.worlds.jobs import Job


class PrepareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Read a data set into the descriptor that comes along."""

    name: str
    data_dir: str
    download: bool


# Answered by the description that `open_samples` takes, which travels on as it is.
PREPARE = Job("distcheck.workloads.datasets.files:prepare_job", PrepareRequest, bytes, ("data",))
