"""Jobs are declared once, with what they are asked, answer and are given; worlds know none."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from distcheck.worlds.jobs import Descriptors, Job
from tests.sources import MODULES, PACKAGE, nodes, text_of

# The jobs of a room that knows no job: what only torch can ask of the launcher's store, and the
# schedules of a simulated world, whatever its ranks do.
OF_WORLDS = {"distcheck.worlds.remote.bootstrap:through_store"}


class Asked(msgspec.Struct, frozen=True):
    number: int


def declared() -> Iterator[tuple[Path, str]]:
    """(module, target) of every job in distcheck."""
    for path in [path for path in MODULES if "Job(" in text_of(path)]:
        for node in nodes(path):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "Job":
                assert isinstance(node.args[0], ast.Constant)
                yield path, str(node.args[0].value)


DECLARED = list(declared())


def test_each_job_is_declared_once_and_none_by_the_worlds() -> None:
    targets = [target for _, target in DECLARED]
    assert len(targets) == len(set(targets)) > 10
    assert {t for path, t in DECLARED if path.is_relative_to(PACKAGE / "worlds")} == OF_WORLDS


@pytest.mark.parametrize("target", [target for _, target in DECLARED])
def test_a_job_is_done_by_the_function_that_it_names(target: str) -> None:
    """The decorator refuses another function; here is one for each."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    names = list(function.__wrapped__.__annotations__)
    assert names[1:] == ["fds", "reporter", "return"], "a request, descriptors, the reporter"


def twice(asked: Asked, fds: Descriptors, reporter: object) -> dict[str, int]:
    return {"twice": 2 * asked.number, **fds}


TWICE = Job(f"{__name__}:twice", Asked, dict[str, int], ("trace",))


def test_requests_and_answers_have_their_types_at_both_ends() -> None:
    done = TWICE.does(twice)(TWICE.encode(Asked(4)), {"trace": 7}, None)  # type: ignore[arg-type]
    assert TWICE.decode(done) == {"twice": 8, "trace": 7}
    with pytest.raises(msgspec.ValidationError):
        TWICE.does(twice)(msgspec.msgpack.encode([1]), {}, None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        TWICE.encode(b"4")  # type: ignore[arg-type]


def test_bytes_and_nothing_travel_as_they_are() -> None:
    assert Job("a:b", bytes, bytes).encode(b"\xc1") == b"\xc1"
    nothing = Job("a:b", bytes, type(None))
    assert nothing.decode(msgspec.msgpack.encode(None)) is None


def test_another_function_and_another_descriptor_are_refused() -> None:
    with pytest.raises(TypeError, match=r"does a job whose target is other:name"):
        Job("other:name", Asked, dict[str, int]).does(twice)
    TWICE.accept({"trace": 1})
    with pytest.raises(TypeError, match="takes no descriptor baseline, data"):
        TWICE.accept({"trace": 1, "data": 2, "baseline": 3})
