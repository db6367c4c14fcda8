"""Run as a program, with the standard library alone: what a launcher starts in place of a rank.

Passes on what the launcher has given it about the job, and stays for as long as the rank that takes
its place. Imports little, because there is one for every rank.
"""

import json
import os
import socket
import sys


def main(address: str) -> None:
    """Sends this process's environment, and MPICH's connection to its launcher."""
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
        os._exit(0)  # an abnormal end in Open MPI's eyes; keeper.py ends the rest


if __name__ == "__main__":
    main(sys.argv[1])
