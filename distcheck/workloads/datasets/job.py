"""The job that reads a data set, as it is asked for. No torch."""

import msgspec

PREPARE = "distcheck.workloads.datasets.files:prepare_job"


class PrepareJob(msgspec.Struct, frozen=True, kw_only=True):
    """Read a data set into the descriptor that comes along."""

    name: str
    data_dir: str
    download: bool
