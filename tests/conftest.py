"""One pool per test process: a helper that has imported torch once; and runs without a rerun."""

import importlib.metadata
import random
import sys
from collections.abc import Sequence

import msgspec
import pytest

from distcheck.plan import cases as plan
from distcheck.plan.settings import Request
from distcheck.records import Case
from distcheck.verification.run import shared_pool
from distcheck.workloads.cells import CELLS
from distcheck.worlds.pool import Pool


@pytest.fixture(autouse=True)
def random_numbers_of_its_own() -> None:
    """No test draws other random numbers because of those that ran before it. Only torch's default
    generator: `torch.manual_seed` notes a stack for the GPU with every call.
    """
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


@pytest.fixture
def pool() -> Pool:
    """The one that `distcheck.verify` keeps, with a helper that is ready."""
    pool = shared_pool()
    pool.wait_ready()
    return pool


@pytest.fixture
def kept_pool(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that judge in this process do so on the pool that is there, and leave it open."""

    class Kept:
        def __getattr__(self, name: str) -> object:
            return getattr(pool, name)

        def close(self) -> None:
            pass

    for place in ("compare.command", "cli.show_and_keep"):
        monkeypatch.setattr(f"distcheck.{place}.Pool", Kept)


@pytest.fixture(scope="session")
def torchvision_loads() -> None:
    """For tests of what torchvision reads or builds: it is not there beside every torch."""
    try:
        import torchvision  # noqa: F401
    except Exception as error:
        version = importlib.metadata.version("torch")
        pytest.skip(f"torchvision does not load with torch {version}: {error}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--with-reruns", action="store_true",
        help="run every case a second time, and mutants in processes, as users do, where the "
        "ordinary suite does not",
    )  # fmt: skip


@pytest.fixture
def no_rerun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`distcheck.verify` runs one world for each case, which takes half of the time: for tests of
    what one world shows. Reruns have tests of their own (world/test_separate.py, test_verify.py,
    the mutants that only a rerun shows); `tox -e sweep` runs these with them.
    """
    if request.config.getoption("--with-reruns"):
        return
    planned = plan.plan_cases

    def once(asked: Request) -> Sequence[Case]:
        # A cell without a rerun is one that the default run has beside its own: see cells_to_run.
        return [
            case if case.workload in CELLS else msgspec.structs.replace(case, rerun=False)
            for case in planned(asked)
        ]

    monkeypatch.setattr(plan, "plan_cases", once)
