"""What a host sends of a trace: all that was written, and nothing that is not its ranks' own."""

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from distcheck.worlds.remote import protocol
from distcheck.worlds.remote.agent import written_parts
from distcheck.worlds.remote.coordinator import RemoteShare

PAGE = 4096
REGIONS = {0: ((0, PAGE), (4 * PAGE, 2 * PAGE)), 1: ((PAGE, PAGE), (6 * PAGE, 2 * PAGE))}
TOTAL = 8 * PAGE


@pytest.fixture
def trace() -> Iterator[int]:
    fd = os.memfd_create("trace")
    os.ftruncate(fd, TOTAL)
    yield fd
    os.close(fd)


class OneLink(SimpleNamespace):
    """Stands for a link: remembers why it was lost."""

    lost = ""

    def lose(self, why: str) -> None:
        self.lost = why


def share(trace: int) -> tuple[RemoteShare, OneLink]:
    link = OneLink()
    return RemoteShare(link, 1, trace, REGIONS), link  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [0, PAGE - 3, 4 * PAGE, 6 * PAGE - 3])
def test_a_rank_writes_its_own_regions(trace: int, offset: int) -> None:
    ranks, link = share(trace)
    ranks.take(protocol.Written(1, 0, offset, b"abc"))
    assert os.pread(trace, 3, offset) == b"abc"
    assert not link.lost


@pytest.mark.parametrize(
    ("rank", "offset"),
    [(0, PAGE - 2), (0, PAGE), (0, 3 * PAGE), (0, 6 * PAGE - 1), (1, 0), (1, TOTAL - 1), (0, -1)],
)
def test_what_lies_outside_is_refused_whole(trace: int, rank: int, offset: int) -> None:
    ranks, link = share(trace)
    ranks.take(protocol.Written(1, rank, offset, b"abc"))
    assert os.pread(trace, TOTAL + 8, 0) == bytes(TOTAL)
    assert link.lost == f"it wrote outside rank {rank}'s part of the trace"


@pytest.mark.parametrize(
    "message",
    [protocol.Written(1, 7, 0, b"abc"), protocol.RankHeartbeat(1, {0: 1.0, 7: 1.0}, ())],
    ids=["written", "signs"],
)
def test_a_host_speaks_of_its_own_ranks(trace: int, message: protocol.FromHost) -> None:
    ranks, link = share(trace)
    ranks.take(message)
    assert link.lost == "it names rank 7, which it does not own"


def test_holes_are_not_sent_and_writing_is(trace: int) -> None:
    regions = ((0, 2 * PAGE), (3 * PAGE, PAGE), (5 * PAGE, 3 * PAGE))
    assert list(written_parts(trace, regions)) == []
    for offset in (PAGE + 5, 2 * PAGE, 6 * PAGE):  # the second one in no region
        os.pwrite(trace, b"abc", offset)
    parts = list(written_parts(trace, regions))
    assert [begin for begin, _ in parts] == [PAGE, 6 * PAGE]
    for place in (PAGE + 5, 6 * PAGE):
        assert any(begin <= place and place + 3 <= end for begin, end in parts)
    inside = [
        offset <= begin and end <= offset + n for begin, end in parts for offset, n in regions
    ]
    assert sum(inside) == len(parts)


def test_a_region_up_to_the_end_of_the_file(trace: int) -> None:
    os.pwrite(trace, b"abc", TOTAL - 3)
    assert list(written_parts(trace, ((7 * PAGE, PAGE),))) == [(7 * PAGE, TOTAL)]
