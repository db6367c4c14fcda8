"""Program that an MPI launcher starts in place of a rank. Imports only the standard library, and
little of it, because there is one such process for every rank.

It sends the environment that the launcher has set to the front end, and exits when the rank that
replaces it exits.
"""

import json
import os
import socket
import sys


def main(address: str) -> None:
    """Send this process's environment, and MPICH's connection to its launcher, to `address`."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    variables = json.dumps(dict(os.environ)).encode()
    length = len(variables).to_bytes(4, "little")
    fds = [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []
    socket.send_fds(connection, [length[:1]], fds)
    connection.sendall(length[1:] + variables)
    try:
        connection.recv(1)
    finally:
        os._exit(0)  # an abnormal end for Open MPI; keeper.py ends the rest


if __name__ == "__main__":
    main(sys.argv[1])
