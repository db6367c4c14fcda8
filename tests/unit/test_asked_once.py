"""What torch asks of the machine in every process is asked once, and answered alike."""

import linecache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from distcheck.worlds.local import asked_once

_GROUP = "torch.distributed.backends"


def test_the_answer_is_kept_for_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    real: Any = metadata.entry_points

    def counted(**wanted: Any) -> Any:
        asked.append(wanted)
        return real(**wanted)

    monkeypatch.setattr(metadata, "entry_points", counted)
    asked_once._backends_of_packages.cache_clear()
    asked_once.ask()
    asked_once.ask()
    assert asked == [{"group": _GROUP}]
    with asked_once.answered():
        assert list(metadata.entry_points(group=_GROUP)) == list(real(group=_GROUP))
        assert asked == [{"group": _GROUP}]
        assert list(metadata.entry_points(group="pytest11")) == list(real(group="pytest11"))
    assert asked == [{"group": _GROUP}, {"group": "pytest11"}]
    assert metadata.entry_points is counted
    asked_once._backends_of_packages.cache_clear()


def test_it_is_put_back_where_the_group_cannot_be_made() -> None:
    real = metadata.entry_points
    with pytest.raises(RuntimeError, match="no"), asked_once.answered():
        raise RuntimeError("no")
    assert metadata.entry_points is real


def test_files_of_the_call_stack_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    file = asked_once.__file__
    monkeypatch.setattr(linecache, "cache", {})
    asked_once.ask()
    assert linecache.getline(file, 1) == Path(file).read_text().splitlines(keepends=True)[0]
    monkeypatch.setattr("builtins.open", None)
    monkeypatch.setattr("tokenize.open", None)
    linecache.checkcache(file)
    assert file in linecache.cache, "it would be read again in every process"
