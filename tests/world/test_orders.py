"""The predicted reduction orders are gloo's and DDP's own, to the bit."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distcheck.preparation import calibrate
from distcheck.worlds.pool import Pool
from tests.world.launching import run

SIZES = st.one_of(
    st.integers(1, 40),
    st.integers(1, 5000),
    st.sampled_from([2**18 - 1, 2**18, 2**18 + 1, 2**19 + 3, 1_000_003]),
)
DTYPES = st.sampled_from(["float32", "float64", "float16", "bfloat16"])
EXAMPLES = st.lists(
    st.tuples(SIZES, DTYPES, st.integers(0, 1000), st.sampled_from(["plain", "spread"])),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8])
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(examples=EXAMPLES)
def test_all_reduce_adds_in_the_predicted_order(
    pool: Pool, world: int, examples: list[tuple[int, str, int, str]]
) -> None:
    outcomes, results = run(pool, "reduce_sizes", world, ranks=world, examples=examples)
    assert {o.outcome for o in outcomes} == {"finished"}, outcomes[0].detail
    assert [msgspec.msgpack.decode(result) for result in results] == [[]] * world


def test_many_segments(pool: Pool) -> None:
    """More than 2 W MiB: the ring has more segments than its least number."""
    examples = [(2_400_000, "float32", 1, "plain"), (5_000_001, "bfloat16", 2, "spread")]
    for world in (2, 3, 4):
        _, results = run(pool, "reduce_sizes", world, ranks=world, examples=examples)
        assert [msgspec.msgpack.decode(result) for result in results] == [[]] * world


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_calibration_confirms_the_ring_and_ddps_buckets(pool: Pool, world: int) -> None:
    found = calibrate(
        pool,
        backend="gloo",
        world=world,
        orders=("all-reduce", "ddp-buckets"),
        dtypes=("float32", "float64"),
        deadline_s=30.0,
    )
    assert found.failures == {"all-reduce": "", "ddp-buckets": ""}
