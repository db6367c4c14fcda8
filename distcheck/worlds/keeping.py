"""Starting a program under a keeper, which ends all that it has started; see `keeper.py`."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# Of distcheck's own programs: no file of another's runs in them.
PYTHON = (sys.executable, "-I", "-S")
_KEEPER = str(Path(__file__).with_name("keeper.py"))


def start_kept(
    command: Sequence[str],
    control: socket.socket,
    *,
    env: Mapping[str, str],
    output: IO[bytes] | int,
    folder: str = "",
    cwd: Path | None = None,
) -> "subprocess.Popen[bytes]":
    """The keeper, which ends when the other end of `control` is closed, or the command has ended.
    `folder` is that of an MPI launcher's files.
    """
    return subprocess.Popen(
        [*PYTHON, _KEEPER, str(os.getpid()), str(control.fileno()), folder, *command],
        env=env,
        cwd=cwd,
        pass_fds=[control.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # Ctrl-C is the front's to handle
    )
