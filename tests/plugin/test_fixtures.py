"""Fixtures that ask for `world`: set up and torn down on every rank, whatever their scope."""

from dataclasses import dataclass

import pytest

from tests.plugin.running import run_warm

FIXTURES = """
import os
import pytest

def note(text):
    with open("notes", "a") as notes:
        notes.write(f"{{text}}\\n")

def made(scope):
    @pytest.fixture(scope=scope)
    def one(world):
        note(f"{{world.rank}} {{scope}} up")
        yield scope
        note(f"{{world.rank}} {{scope}} down")
    return one

of_session, of_module, of_class, of_function = map(made, ("session", "module", "class", "function"))

@pytest.fixture(scope="module", params=[1, 2])
def data(request):
    yield request.param
    note(f"data {{request.param}} down in {{os.getpid()}}")

@pytest.fixture(scope="module")
def on_data(world, data):
    return 10 * data

@pytest.fixture
def bad(world, of_module):
    yield
    raise ValueError("not torn down")

@pytest.fixture
def worse(world, of_module):
    yield
    raise KeyError("nor this")

@pytest.mark.world(2, reuse={reuse})
class TestAll:
    def test_order(self, of_function, of_class, of_session, of_module): pass
    def test_once_more(self, of_module, of_session): pass

    def test_bad(self, bad, of_session): pass
    def test_both(self, bad, worse, of_session): pass
    def test_body_too(self, bad, worse, of_session): assert 1 == 2
    def test_skips(self, bad, of_session): pytest.skip("nothing here")

    def test_on_data(self, on_data, data): assert on_data == 10 * data
"""


@dataclass(frozen=True)
class Ran:
    reuse: bool
    text: str
    notes: list[str]

    def of_rank(self, rank: int) -> list[str]:
        return [line[2:] for line in self.notes if line.startswith(f"{rank} ")]


@pytest.fixture(scope="module", params=[False, True], ids=["fresh", "kept"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("fixtures")
    done = run_warm(folder, FIXTURES.format(reuse=request.param), "--tb=short")
    notes = (folder / "notes").read_text().splitlines()
    return Ran(reuse=request.param, text=done.stdout + done.stderr, notes=notes)


def test_what_a_rank_sets_up_it_tears_down(ran: Ran) -> None:
    """In pytest's order, and in a kept world after every test."""
    scopes = ["session", "module", "class", "function"]
    order = [f"{scope} up" for scope in scopes] + [f"{scope} down" for scope in scopes[::-1]]
    once_more = ["session up", "module up", "module down", "session down"]
    for rank in (0, 1):
        assert ran.of_rank(rank)[:12] == order + once_more


def test_what_a_rank_has_inherited_it_does_not_tear_down(ran: Ran) -> None:
    assert "4 failed, 4 passed" in ran.text, ran.text
    down = [line.partition(" in ")[::2] for line in ran.notes if line.startswith("data")]
    assert [what for what, _ in down] == ["data 1 down", "data 2 down"]
    assert len({pid for _, pid in down}) == 1


def test_a_fixture_that_cannot_be_torn_down_holds_up_no_other(ran: Ran) -> None:
    for rank in (0, 1):
        assert ran.of_rank(rank)[12:].count("module down") == 4
        assert ran.of_rank(rank)[12:].count("session down") == 4
    for line in (
        "test_bad - all 2 ranks: ValueError: not torn down",
        "test_both - all 2 ranks: ExceptionGroup: errors while tearing down",
        "test_body_too - all 2 ranks: assert 1 == 2",
        "test_skips - all 2 ranks: ValueError: not torn down",
        "also, when fixtures were torn down: ValueError: not torn down (",
        "also, when fixtures were torn down: KeyError: 'nor this' (",
    ):
        assert line in ran.text, ran.text
