"""Meshes: who reads which samples, and what is refused."""

import pytest

from distcheck.contract import strategy
from distcheck.records.mesh import Mesh, promised_axes, promised_mesh

TWO_BY_THREE = Mesh((("data", 2), ("tensor", 3)))


def test_ranks_are_counted_along_the_last_axis_first() -> None:
    assert [TWO_BY_THREE.coordinate(rank, "data") for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [TWO_BY_THREE.coordinate(rank, "tensor") for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert TWO_BY_THREE.readers == (0, 3)
    assert TWO_BY_THREE.along("data") == [(0, 3), (1, 4), (2, 5)]
    assert TWO_BY_THREE.along("tensor") == [(0, 1, 2), (3, 4, 5)]
    assert TWO_BY_THREE.spread([7, 8]) == [7, 7, 7, 8, 8, 8]


def test_a_mesh_without_data_has_one_reader() -> None:
    mesh = Mesh((("tensor", 2), ("data", 2)))
    assert mesh.readers == (0, 1)
    alone = Mesh((("pipeline", 3),))
    assert (alone.data, alone.readers, alone.ranks_of(0)) == (1, (0,), (0, 1, 2))


def test_one_axis_takes_what_is_left() -> None:
    axes = promised_axes({"data": -1, "tensor": 2})
    assert str(promised_mesh(axes, 6)) == "data 3 x tensor 2"
    assert promised_mesh((), 4) is None


@pytest.mark.parametrize(
    ("parallel", "world", "said"),
    [
        ({"data": 2, "tensor": 2}, 3, "data 2 x tensor 2 needs 4 ranks, and the world has 3"),
        ({"data": -1, "tensor": 2}, 1, "needs a multiple of 2 ranks, and the world has 1"),
        ({"data": -1, "tensor": 10**12}, 4, "needs a multiple of 1000000000000 ranks"),
    ],
)
def test_a_mesh_that_does_not_fit(parallel: dict[str, int], world: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        promised_mesh(promised_axes(parallel), world)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({}, "expected a dict"),
        (["tensor"], "expected a dict"),
        ({"rows": 2}, "'rows'; known axes are data, tensor, pipeline, sequence, expert"),
        ({"tensor": 0}, "tensor 0; a size is a number from 1"),
        ({"tensor": True}, "tensor True; a size is a number from 1"),
        ({"tensor": 2.0}, "tensor 2.0; a size is a number from 1"),
        ({"data": -1, "tensor": -1}, "-1 for several axes"),
    ],
)
def test_what_is_no_promise(parallel: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        strategy(parallel=parallel)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "axes", [(("tensor", 0),), (("tensor", 2), ("tensor", 2)), (("data", -2), ("tensor", -1))]
)
def test_axes_of_a_damaged_file_are_refused(axes: object) -> None:
    with pytest.raises(ValueError, match=r"a size is a number|named twice"):
        promised_mesh(axes, 4)  # type: ignore[arg-type]
