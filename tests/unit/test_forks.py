"""Many forks: when memory is gathered, and that nothing but its pages changes."""

import mmap
import os

import pytest

from distcheck.worlds.local import forks
from tests.large_pages import large_bytes, skip_where_nothing_is_gathered

MAPS = """\
55d0c8a00000-55d0c8c00000 r-xp 00000000 fe:00 123  /usr/bin/python3.11
55d0c8c00000-55d0c8e00000 rw-p 00200000 fe:00 123  /usr/bin/python3.11
55d0ca000000-55d0ca800000 rw-p 00000000 00:00 0    [heap]
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
7f0000400000-7f0000600000 r--p 00000000 00:00 0
7f0000600000-7f0000800000 rw-s 00000000 00:01 55   /memfd:shared (deleted)
7f0000800000-7f0000a00000 rw-s 00000000 00:00 0
"""
SIZE = 64 << 20


def test_private_memory_of_no_file_is_what_a_fork_copies() -> None:
    assert forks._anonymous_ranges(MAPS) == [
        (0x55D0CA000000, 0x55D0CA800000),
        (0x7F0000000000, 0x7F0000400000),
    ]


def test_memory_is_gathered_whenever_forks_double(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[bool] = []
    monkeypatch.setattr(forks, "move_to_huge_pages", lambda: gathered.append(True))
    many = forks.HugePagesForForks(first=4)
    counts = []
    for _ in range(40):
        many.about_to()
        counts.append(len(gathered))
    assert [counts.index(times) + 1 for times in (1, 2, 3, 4)] == [4, 8, 16, 32]
    assert counts[-1] == 4


def test_gathered_memory_holds_what_it_held_here_and_in_a_fork() -> None:
    skip_where_nothing_is_gathered()
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, SIZE, 4096):
            memory[at : at + 8] = at.to_bytes(8, "little")
        memory.madvise(mmap.MADV_HUGEPAGE)
        before = large_bytes(os.getpid())
        forks.move_to_huge_pages()
        assert large_bytes(os.getpid()) - before > SIZE // 2
        assert all(
            int.from_bytes(memory[at : at + 8], "little") == at for at in range(0, SIZE, 4096)
        )
        child = os.fork()
        if child == 0:
            memory[0:8] = b"its own!"
            os._exit(0 if memory[4096:4104] == (4096).to_bytes(8, "little") else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert memory[0:8] == bytes(8)
