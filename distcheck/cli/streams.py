"""Standard output and error that cannot end the command.

A pipe without a reader, a stream closed before the start and a full disk raise no error: the
verdict, its exit code and the end of the ranks do not depend on the reader.
"""

import errno
import os
import sys
from typing import IO, Any

_STANDARD = (0, 1, 2)


class FaultTolerantStream:
    """A text stream that drops output which cannot be written; otherwise it is the given stream.
    `lost` is the reason, "" if the reader has closed the pipe, which is normal.
    """

    lost: str = ""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text; return the number of characters, including those that are dropped."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        """Redirect the stream to /dev/null, for later output and that of Python at exit."""
        if error.errno != errno.EPIPE:
            self.lost = error.strerror or type(error).__name__
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def replace_standard_streams() -> FaultTolerantStream:
    """Replace both streams of this process by outputs; return standard output.

    Closed descriptors 0 to 2 are opened on /dev/null: otherwise a socket or a rank's file would get
    these numbers, and printed text would go there.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
    output = FaultTolerantStream(sys.stdout or _open(1))
    sys.stdout, sys.stderr = output, FaultTolerantStream(sys.stderr or _open(2))  # type: ignore[assignment]
    return output


def _open(number: int) -> IO[str]:
    return os.fdopen(number, "w", errors="replace", closefd=False)
