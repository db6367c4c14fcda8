"""What backend mpi refuses, and how it cuts tensors; no MPI is started."""

import pytest
import torch

from distcheck.addons.mpi import group
from distcheck.backends._python_group import elements_by_rank

OPS = [("sparse", torch.ones(2).to_sparse(), "moves dense tensors, not torch.sparse_coo")]


@pytest.mark.parametrize(("name", "tensor", "said"), OPS, ids=[name for name, *_ in OPS])
def test_tensors_that_are_not_moved(name: str, tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        group.check_tensors("broadcast", [tensor])


def test_a_tensor_elsewhere() -> None:
    with pytest.raises(ValueError, match="on meta; backend mpi moves CPU tensors"):
        group.check_tensors("broadcast", [torch.ones(2, device="meta")])


def test_dtypes_are_not_mixed() -> None:
    with pytest.raises(ValueError, match=r"torch.float32 and torch.float64 together"):
        group.check_tensors("all_gather", [torch.ones(2), torch.ones(2).double()])


def test_shared_memory_is_read_and_not_written() -> None:
    tensor = torch.ones(1, 3).expand(2, 3)
    group.check_tensors("send", [tensor])
    with pytest.raises(ValueError, match=r"share memory \(shape \(2, 3\), strides \(0, 1\)\)"):
        group.check_tensors("recv", [tensor], written=True)
    for fine in (torch.ones(1).expand(1), torch.ones(4, 6).t(), torch.ones(0).expand(3, 0)):
        group.check_tensors("recv", [fine], written=True)


def test_lists_and_parts() -> None:
    one = torch.ones(2, 2)
    group.check_list("gather", 2, [torch.ones(4), torch.ones(4)], one)
    with pytest.raises(ValueError, match="gather: 3 tensors for 2 ranks"):
        group.check_list("gather", 2, [one] * 3, one)
    with pytest.raises(ValueError, match="gather: a tensor of 5 elements among those of 4"):
        group.check_list("gather", 2, [one, torch.ones(5)], one)
    group.check_parts("x", 3, whole=torch.ones(3, 4), part=one)
    with pytest.raises(ValueError, match="x: 12 elements are not 2 times 4"):
        group.check_parts("x", 2, whole=torch.ones(3, 4), part=one)


def test_rows_to_elements() -> None:
    tensor = torch.ones(6, 2)
    assert elements_by_rank("x", 3, tensor, []) == [4, 4, 4]
    assert elements_by_rank("x", 3, tensor, [1, 0, 5]) == [2, 0, 10]
    assert elements_by_rank("x", 2, torch.ones(0, 2), [0, 0]) == [0, 0]
    for splits in ([3, 3], [1, 1, 1], [7, 0, -1]):
        with pytest.raises(ValueError, match="of 6 rows, 3 ranks"):
            elements_by_rank("x", 3, tensor, splits)
    with pytest.raises(ValueError, match="6 rows cannot be cut into 4 equal parts"):
        elements_by_rank("x", 4, tensor, [])
