"""Makes errors on standard output and standard error harmless.

A pipe without a reader, a stream that was closed before the start, or a full disk raises no error.
The verdict, the exit code and the shutdown of ranks therefore do not depend on the reader of the
output.
"""

import errno
import os
import sys
from typing import IO, Any

_STANDARD = (0, 1, 2)


class FaultTolerantStream:
    """Text stream that drops output which cannot be written, and otherwise behaves like the given
    stream. `lost` is the reason for dropped output; it is empty if the reader has closed the pipe,
    which is normal.
    """

    lost: str = ""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text. Return the number of characters, including dropped ones."""
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
        """Redirect the stream to /dev/null, for later output and for output that Python writes at
        exit.
        """
        if error.errno != errno.EPIPE:
            self.lost = error.strerror or type(error).__name__
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def replace_standard_streams() -> FaultTolerantStream:
    """Replace both standard streams of this process by fault-tolerant ones, and return standard
    output.

    Descriptors 0 to 2, if closed, are opened on /dev/null. Otherwise a socket or a file of a rank
    would get one of these numbers, and receive printed text.
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
