"""Communication of a guard's check: always a few numbers, and more if something differs.

All messages use a process group that belongs to the guard, so that they cannot match the script's
collectives. It uses gloo on the CPU, so that no GPU stream is synchronized. Each exchange begins
with a row of fixed width that names its part of the check. If ranks are in different parts, they
detect this from the row; gloo itself would mix up bytes or block.
"""

import atexit
import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distcheck.machine import compat

PARTS = ("numbers", "an audit", "digests", "sums", "a file's name")


class LostError(RuntimeError):
    """Raised if not all ranks take part in the same exchange."""


_PATIENCE_S = 5.0  # Heuristic: healthy ranks reach a check at about the same time.


class RankProgress:
    """Progress of each rank, in the guard's part of the store: the step of its last check, and the
    step after which its guard ended.
    """

    def __init__(self, store: Any, place: int, world: int) -> None:
        self._store, self._place, self._world = store, place, world
        self._last = 0
        atexit.register(self.end)

    def arrive(self, step: int) -> None:
        """Record that this rank has reached the check after a step."""
        self._write("at", step)

    def made(self, steps: int) -> None:
        """Set the number of steps of this rank. It is written when the guard of the rank ends."""
        self._last = steps

    def end(self) -> None:
        """Record that this rank takes part in no further checks."""
        atexit.unregister(self.end)
        self._write("end", self._last)
        self._store = None

    def _write(self, what: str, step: int) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the process that serves the store has exited
                self._store.set(f"{what}/{self._place}", str(step))

    def missing(self, step: int) -> dict[int, str]:
        """Return the ranks, as indices, that did not reach the check after a step, with their last
        known progress. Return nothing if the store cannot be read.
        """
        until = time.monotonic() + _PATIENCE_S
        while self._store is not None:
            try:
                behind = [place for place in range(self._world) if self._read("at", place) < step]
                ended = {p: at for p in behind if (at := self._read("end", p)) >= 0}
                if ended:
                    return {p: f"its guard ended after step {at}" for p, at in ended.items()}
                if behind and time.monotonic() > until:
                    return {p: _last(self._read("at", p)) for p in behind}
            except RuntimeError:
                return {}
            if time.monotonic() > until:
                return {}
            time.sleep(0.05)
        return {}

    def _read(self, what: str, place: int) -> int:
        """Return a recorded step, or -1."""
        key = f"{what}/{place}"
        if not self._store.check([key]):
            return -1
        said = self._store.get(key)
        return int(said) if said.isdigit() else -1


def _last(step: int) -> str:
    return f"its last check was after step {step}" if step >= 0 else "it reached no check"


class Peers:
    """The ranks that hold replicas; at least this one. `width` is the maximum length of a row."""

    def __init__(self, group: Any, timeout_s: float, width: int = 1) -> None:
        self._width = width
        self.ranks: list[int] = [0]
        self.rank = 0  # index within `ranks`
        self._group: Any = None
        self.arrivals: RankProgress | None = None
        if not dist.is_available() or not dist.is_initialized():
            return
        group = group or dist.group.WORLD
        self.ranks = list(dist.get_process_group_ranks(group))
        self.rank = self.ranks.index(dist.get_rank())
        if len(self.ranks) == 1:
            return
        if dist.get_backend(group) == "mpi":  # has no store that gloo can start from
            self._group = group
            return
        # Not by new_group: unless all ranks of the job call it, torch before 2.15 names a group by
        # the number of groups, and a later group reads the addresses of an earlier one.
        kind: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined]
        store, place = _new_store(self.ranks), (self.rank, len(self.ranks))
        self._group = kind(store, *place, timedelta(seconds=timeout_s))
        self.arrivals = RankProgress(store, *place)

    def close(self) -> None:
        """End the group, if the guard created it."""
        if self.arrivals is not None:
            self.arrivals.end()
        self._group = None

    def gather(self, numbers: Sequence[int], part: str = PARTS[0]) -> list[list[int]]:
        """Return the numbers of every rank; all ranks must pass equally many. Raises LostError."""
        if len(self.ranks) == 1:
            return [list(numbers)]
        row = [PARTS.index(part), len(numbers), *numbers, *[0] * (self._width - len(numbers))]
        rows = [one.tolist() for one in self._allgather(torch.tensor(row, dtype=torch.int64))]
        parts = [PARTS[one[0]] if 0 <= one[0] < len(PARTS) else "another" for one in rows]
        if len({(part, row[1]) for part, row in zip(parts, rows, strict=True)}) > 1:
            said = ", ".join(f"rank {r}: {p}" for r, p in zip(self.ranks, parts, strict=True))
            raise LostError(f"ranks are in different phases of a check ({said})")
        return [one[2 : 2 + len(numbers)] for one in rows]

    def gather_bytes(self, data: bytes, part: str) -> list[bytes]:
        """Return the bytes of every rank, of any length. Raises LostError."""
        lengths = [one[0] for one in self.gather([len(data)], part)]
        if len(self.ranks) == 1:
            return [data]
        own = torch.zeros(max(lengths), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        room = self._allgather(own)
        return [one.numpy().tobytes()[:length] for one, length in zip(room, lengths, strict=True)]

    def _allgather(self, own: torch.Tensor) -> list[torch.Tensor]:
        room = [torch.empty_like(own) for _ in self.ranks]
        try:
            self._group.allgather([room], [own]).wait()
        except RuntimeError as error:
            raise LostError(str(error)) from error
        return room


def _new_store(ranks: Sequence[int]) -> Any:
    """Return a part of the job's store that no earlier guard of these ranks has written to."""
    kind: Any = dist.PrefixStore  # type: ignore[attr-defined]
    own = kind(f"distcheck guard {'_'.join(map(str, ranks))}", compat.default_store())
    return kind(str(own.add(f"guards/{dist.get_rank()}", 1)), own)
