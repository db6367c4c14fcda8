"""When the size of errors is a sign of a shorter dtype, and when it says nothing."""

import msgspec
import pytest

from tests.unit.test_diagnosis import causes, equal, measured


@pytest.mark.parametrize(
    ("elements", "grid", "named"),
    [
        (3, False, {"low-precision", "noise", "unexplained"}),  # so few may err little by chance
        (16, False, set()),  # whatever happened to them may have happened to the others
        (16, True, {"low-precision", "unexplained"}),  # numbers of bfloat16 are no accident
    ],
)
def test_error_size_needs_one_cause(elements: int, grid: bool, named: set[str]) -> None:
    step = measured([equal(2)] * 2, equal(2), seed=0)
    none = (0, 0)
    first, other, last = (
        msgspec.structs.replace(
            p, wrong=(0, 1), remainder=(1e9, 1e9), of_mean=none, of_own=none, of_either=none
        )
        for p in step.parameters
    )
    first, last = (
        msgspec.structs.replace(p, shorter=("bfloat16",) * 2, on_grid=(grid,) * 2)
        for p in (first, last)
    )
    other = msgspec.structs.replace(other, elements=elements)
    mixed = msgspec.structs.replace(step, parameters=(first, other, last))
    assert causes(mixed) == named
    alone = msgspec.structs.replace(step, parameters=(first, last))
    assert causes(alone) == {"low-precision", *(() if grid else ("noise",))}
