"""The ranks of a world that are forked on this machine, by a pool or its further interpreters."""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.local.children import Child
from distcheck.worlds.shares import RankStart, Share

if TYPE_CHECKING:
    from distcheck.worlds.pool import Pool


class LocalShare(Share):
    """Ranks that this process's own pool has forked, or its further interpreters."""

    def __init__(
        self,
        pool: "Pool",
        *,
        target: str,
        starts: Mapping[int, RankStart],
        fds: Descriptors,
        new_child: Callable[[int], Child] | None = None,
    ) -> None:
        self._places = {rank: pool.place_of(one.interpreter) for rank, one in starts.items()}
        self.children: dict[int, Child] = {}
        pool.wait_ready()  # before there are pipes: a helper forked from here would keep them open
        release_fd, self._release = os.pipe()
        dump_fd, self._dump = os.pipe()
        try:
            for rank, start in starts.items():
                self.children[rank] = self._places[rank].start(
                    target,
                    start,
                    fds=fds,
                    release_fd=release_fd,
                    dump_fd=dump_fd,
                    child=new_child(rank) if new_child is not None else None,
                )
        except BaseException:
            os.close(self._release)
            os.close(self._dump)
            raise
        finally:
            os.close(release_fd)
            os.close(dump_fd)

    def signal(self, child: Child, number: int) -> None:
        """Sends a signal to a rank, if it is still there."""
        for rank, own in self.children.items():
            if own is child:
                self._places[rank].signal(child, number)

    def ask(self) -> None:
        """Makes every rank tell what it is doing."""
        self._close_pipe("_dump")

    def release(self) -> None:
        """Lets ranks that are done leave."""
        self._close_pipe("_release")

    def close(self) -> None:
        """Frees descriptors."""
        for rank, child in self.children.items():
            self._places[rank].forget(child)
        for name in ("_release", "_dump"):
            self._close_pipe(name)

    def _close_pipe(self, name: str) -> None:
        """Tells every child that reads the pipe: by a byte for each, since its end may stay open
        in a helper that was forked from this process later.
        """
        fd = getattr(self, name)
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.write(fd, bytes(len(self.children)))
            os.close(fd)
            setattr(self, name, -1)
