"""Description of a data set whose images are bytes in shared memory, and the job that reads it."""

import msgspec

from distcheck.worlds.jobs import Job


class PrepareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Read a data set into the descriptor that accompanies the request."""

    name: str
    data_dir: str
    download: bool


# Its result is the description that `open_samples` takes, passed on without decoding.
PREPARE = Job("distcheck.workloads.datasets.files:prepare_job", PrepareRequest, bytes, ("data",))


class ArrayDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the bytes, and their digest; `mean` and `std` per channel, pixels in 0..1."""

    shape: tuple[int, int, int]
    classes: int
    train_size: int
    test_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digest: str
    note: str = ""
