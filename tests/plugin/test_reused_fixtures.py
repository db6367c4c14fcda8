"""What the pytest process sets up for a test in a kept world, and what its ranks set up on it."""

import os
from pathlib import Path

import pytest

from tests.world import warm

SHARED = """
import os
import pytest

pytestmark = pytest.mark.world(2, reuse=True)

@pytest.fixture(params=["x", "y"])
def table(request):
    return {"param": request.param}

@pytest.fixture
def folder(world, tmp_path):
    return tmp_path

@pytest.fixture
def grown(world, table):
    table[world.rank] = 1
    return table

@pytest.fixture
def of_config(pytestconfig, record_property, cache):
    record_property("recorded", "here")
    return str(pytestconfig.rootpath)

@pytest.fixture
def made(world, make):
    return make(world.rank)

@pytest.fixture
def lock():
    import threading
    return threading.Lock()

@pytest.fixture
def on_lock(world, lock):
    return lock

@pytest.fixture(scope="session")
def own(world, tmp_path_factory):
    return tmp_path_factory.mktemp("own")

def check(world, folder, name):
    assert name in folder.name, folder
    assert len({str(path) for path in world.gather(folder)}) == 1
    assert folder.parent.exists()
    assert not list(folder.iterdir())
    world.barrier()
    (folder / str(world.rank)).touch()

def test_forked_here(world, tmp_path):
    check(world, tmp_path, "forked_here")

def test_second(world, folder):
    check(world, folder, "second")

def test_third(world, folder, tmp_path):
    assert folder is tmp_path
    check(world, folder, "third")

def test_fourth(world, folder):
    check(world, folder, "fourth")

def test_asked_for_on_ranks(world, request):
    mine = request.getfixturevalue("tmp_path")
    assert "asked_for_on_ranks" in mine.name
    assert len(set(world.gather(mine))) == 2

def test_folders_of_ranks(world, own, table, record_testsuite_property):
    world.barrier()
    assert own.exists() and own.parent.samefile(os.environ["BASE"])
    assert len(set(world.gather(own))) == 2

def test_one_object(world, grown, table):
    assert grown is table
    assert len(table) == 2

def test_through_the_fixture_alone(world, grown):
    assert grown == {"param": grown["param"], world.rank: 1}

def test_set_up_for_another_fixture(world, of_config, pytestconfig, record_property):
    assert of_config == str(pytestconfig.rootpath)
    record_property("rank", world.rank)

@pytest.mark.parametrize("make", [lambda rank: rank + 1])
def test_a_parameter_that_cannot_be_sent(world, made):
    assert made == world.rank + 1

def test_cannot_be_sent(world, on_lock):
    pass
"""


def run(folder: Path, text: str) -> str:
    (folder / "test_it.py").write_text(text)
    ran = warm.run(
        "--junitxml=results.xml", "--basetemp=base",
        cwd=folder, env={**os.environ, "COLUMNS": "150", "BASE": str(folder / "base")},
        timeout=200, program="pytest",
    )  # fmt: skip
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shared")
    return run(folder, SHARED) + (folder / "results.xml").read_text()


def test_a_fixture_of_the_test_is_one_for_its_ranks_and_their_fixtures(text: str) -> None:
    """`tmp_path` of this test and no other, a dictionary that both take, what asks for pytest's own
    fixtures; what ranks ask for themselves is each rank's own.
    """
    assert "1 failed, 13 passed" in text, text
    assert '<property name="recorded" value="here" />' in text
    assert all(f'<property name="rank" value="{rank}" />' in text for rank in range(2))


def test_what_ranks_ask_for_and_cannot_be_sent_is_named(text: str) -> None:
    assert "cannot be sent to a kept world (lock: cannot pickle" in text, text
