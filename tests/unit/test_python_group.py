"""What releases of torch call by other names, and many operations as one."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distcheck.backends._python_group import PythonGroup


class Noting(PythonGroup):
    torch_name = "noting"

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(group_rank=1, group_size=3, group_id="some"))
        self.called: list[tuple[Any, ...]] = []

    def all_gather_single(self, *given: Any) -> Any:
        self.called.append(("all_gather_single", *given))
        return len(self.called)

    def reduce_scatter_single(self, *given: Any) -> Any:
        self.called.append(("reduce_scatter_single", *given))
        return len(self.called)

    def all_to_all_single(self, *given: Any) -> Any:
        self.called.append(("all_to_all_single", *given))
        return len(self.called)

    def allgather(self, *given: Any) -> Any:
        self.called.append(("allgather", *given))
        return len(self.called)

    def _together(self, works: Sequence[Any], results: list[torch.Tensor]) -> Any:
        return list(works), results


def test_who_it_is() -> None:
    group = Noting()
    assert (group.rank(), group.size(), group.name(), group.group_name) == (1, 3, "noting", "some")


@pytest.mark.parametrize(
    ("older", "name"),
    [
        ("_allgather_base", "all_gather_single"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("alltoall_base", "all_to_all_single"),
    ],
)
def test_older_names_are_the_same_operations(older: str, name: str) -> None:
    group = Noting()
    assert getattr(group, older)(1, 2) == 1
    assert group.called == [(name, 1, 2)]


def test_many_are_waited_for_as_one() -> None:
    one, other = torch.ones(1), torch.ones(2)
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        group = Noting()
        assert getattr(group, name)([one, other], [3, 4]) == ([1, 2], [one, other])
        assert group.called == [("all_gather_single", one, 3), ("all_gather_single", other, 4)]
    for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
        group = Noting()
        assert getattr(group, name)([one], [3], 5) == ([1], [one])
        assert group.called == [("reduce_scatter_single", one, 3, 5)]
    group = Noting()
    of_rank_1 = [torch.zeros(1), torch.zeros(2)]
    works, results = group.allgather_coalesced([[one, other], of_rank_1], [3, 4])
    assert (works, results) == ([1, 2], [one, other, *of_rank_1])
    assert group.called == [
        ("allgather", [[one, of_rank_1[0]]], [3]),
        ("allgather", [[other, of_rank_1[1]]], [4]),
    ]
