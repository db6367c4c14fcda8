"""What the front asks of the process that moves traces between shared memory and folders."""

import msgspec

from distcheck.recordings.traces.layout import TraceLayout
from distcheck.worlds.jobs import Job

TRACES = ("trace", "rerun")  # of a case, as they are saved


class TraceFilesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Move traces between shared memory and a folder.

    SAVE answers with the digests of the indexes, which LOAD expects in `indexes`. Without
    `tensors`, only the indexes are moved.
    """

    folder: str
    layout: TraceLayout
    indexes: tuple[str, ...] = ()
    tensors: bool = True


SAVE = Job("distcheck.recordings.traces.files:save_job", TraceFilesRequest, tuple[str, ...], TRACES)
LOAD = Job("distcheck.recordings.traces.files:load_job", TraceFilesRequest, type(None), TRACES)
