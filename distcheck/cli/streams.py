"""Standard output and error of the command, whatever has become of them.

A pipe whose reader has left, a stream that was closed before the start and a full disk end no
command: the verdict, its exit code and the ends of the ranks do not depend on who reads.
"""

import errno
import os
import sys
from typing import IO, Any

_STANDARD = (0, 1, 2)


class Output:
    """A text stream that drops what it cannot write, and in everything else the stream that it is
    made of. `lost` is the reason, and empty where the reader has left, which is a usual end.
    """

    lost: str = ""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Returns the number of characters, also of those that are dropped."""
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
        """What comes later goes nowhere, and with it what Python writes when it ends."""
        if error.errno != errno.EPIPE:
            self.lost = error.strerror or type(error).__name__
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def settle() -> Output:
    """Makes both streams of this process outputs; returns standard output.

    Numbers 0 to 2 that are closed are opened on /dev/null: a socket or a file of a rank would get
    them, and what is printed would go there.
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
    output = Output(sys.stdout or _open(1))
    sys.stdout, sys.stderr = output, Output(sys.stderr or _open(2))  # type: ignore[assignment]
    return output


def _open(number: int) -> IO[str]:
    return os.fdopen(number, "w", errors="replace", closefd=False)
