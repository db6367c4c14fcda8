"""A network switch that takes its time: every frame leaves by all other ports, after a delay.

    python slow_switch.py MILLISECONDS NAMESPACE...

Its ports are the TAP devices `eth0` that it makes in each namespace. It says "ready" when they are
there, and switches until it is ended.
"""

import contextlib
import ctypes
import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_MOST_BYTES = 1 << 16


def enter(namespace: int) -> None:
    """Moves this process into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def port_in(name: str) -> int:
    """Makes `eth0` in a namespace; a descriptor that reads and writes its frames."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    enter(there)
    try:
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TAP | _IFF_NO_PI))
    finally:
        enter(own)
        os.close(own)
        os.close(there)
    return port


def main(delay_s: float, names: list[str]) -> None:
    ports = [port_in(name) for name in names]
    selector = selectors.DefaultSelector()
    for port in ports:
        selector.register(port, selectors.EVENT_READ)
    print("ready", flush=True)
    waiting: deque[tuple[float, int, bytes]] = deque()  # in order of time: the delay is constant
    while True:
        left = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        for key, _ in selector.select(left):
            waiting.append((time.monotonic() + delay_s, key.fd, os.read(key.fd, _MOST_BYTES)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, frame = waiting.popleft()
            for port in ports:
                if port != source:
                    # A full queue, a cable that is out: frames get lost, TCP copes.
                    with contextlib.suppress(OSError):
                        os.write(port, frame)


if __name__ == "__main__":
    main(int(sys.argv[1]) / 1000, sys.argv[2:])
