"""What a check must compare to count, in numbers worked out by hand; less is no pass."""

import pytest

from distcheck.contract import Contract
from distcheck.judge.acceptance import AcceptedDeviation, parse_deviation
from distcheck.plan.coverage import Coverage
from distcheck.records import Adaptation, Case, Compared, ModelLayout, TensorSpec


def tensor(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="float32")


# 15 elements of parameters, 2 of buffers, 15 of the optimizer's.
PARAMETERS = (tensor("weight", 3, 4), tensor("bias", 3))
BUFFERS = (tensor("mean", 2),)
STATE = (tensor("weight/momentum_buffer", 3, 4), tensor("bias/momentum_buffer", 3))
SIZES = [[4, 4, 2]] * 5


def required(*, without: tuple[int, ...] = (), state: bool = True, **contract: object) -> Coverage:
    """World 3, five steps of ten samples."""
    case = Case(
        id="one", strategy="s", world=3, steps=5, batch=10,
        adaptation=Adaptation(without_data=without),
    )  # fmt: skip
    model = ModelLayout(parameters=PARAMETERS, buffers=BUFFERS, optimizer=STATE if state else ())
    return Coverage(case, Contract(**contract), model, SIZES)  # type: ignore[arg-type]


def test_in_a_mesh_one_rank_of_each_data_coordinate_shows_outputs_and_purpose() -> None:
    """World 4 as 2 x 2: samples 4 + 3 in each of five steps, 6 numbers for each."""
    case = Case(id="one", strategy="s", world=4, steps=5, batch=7)
    model = ModelLayout(parameters=PARAMETERS, buffers=(), optimizer=())
    contract = Contract(parallel=(("data", 2), ("tensor", 2)))
    sizes = [[4, 4, 3, 3]] * 5
    owes = Coverage(case, contract, model, sizes, tensor("outputs", 6))
    assert owes.outputs("full batch float32").required == Compared(
        tensors=1, elements=210, ranks=2, steps=5
    )
    assert owes.purpose().required == Compared(tensors=0, elements=35, ranks=2, steps=5)
    without = Coverage(case, contract, model, sizes)
    more = owes.rerun().required.elements - without.rerun().required.elements
    assert more == 4 * 5 * 4 * 6  # every rank's table has room for the largest shard
    assert owes.rerun().required.tensors == without.rerun().required.tensors + 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Compared(tensors=4, elements=(3 * 15 + 3 * 15) * 5, ranks=3, steps=5)),
        (
            {"optimizer_state": "sharded"},  # the state of each tensor is held once
            Compared(tensors=4, elements=(3 * 15 + 15) * 5, ranks=3, steps=5),
        ),
        (
            {"optimizer_state": "cut"},
            Compared(tensors=4, elements=(3 * 15 + 3 * 15) * 5, ranks=3, steps=5),
        ),
        ({"without": (0,)}, Compared(tensors=4, elements=(2 * 15 + 2 * 15) * 5, ranks=2, steps=5)),
    ],
)
def test_a_check_of_tensors_and_their_state(given: dict[str, object], expected: Compared) -> None:
    planned = required(**given).check("parameters", "bitwise", PARAMETERS, state=STATE)  # type: ignore[arg-type]
    assert (planned.check, planned.layer, planned.scope) == ("parameters", "bitwise", "step")
    assert planned.required == expected


def test_a_check_of_tensors_alone() -> None:
    expected = Compared(tensors=2, elements=3 * 15 * 5, ranks=3, steps=5)
    assert required().check("gradients", "rounding", PARAMETERS).required == expected


def test_the_loss_of_every_rank_with_data_at_every_step() -> None:
    planned = required().loss("full batch float32")
    assert (planned.check, planned.layer) == ("loss", "full batch float32")
    assert planned.required == Compared(tensors=1, elements=15, ranks=3, steps=5)
    without = required(without=(1,)).loss("full batch float32").required
    assert without == Compared(tensors=1, elements=10, ranks=2, steps=5)


def test_every_rank_owes_its_outcome_and_its_beginning_with_data_or_without() -> None:
    for some in (required(), required(without=(2,))):
        assert some.outcome() == Compared(ranks=3)
        assert some.initial() == Compared(tensors=3, elements=17 * 3, ranks=3, steps=1)


def test_every_sample_of_every_step() -> None:
    assert required().data() == Compared(tensors=0, elements=50, ranks=3, steps=5)


def test_a_rerun_repeats_everything_that_a_rank_records() -> None:
    """Local and synchronized gradients and the state at each of five steps, the state before."""
    planned = required().rerun()
    assert (planned.check, planned.layer, planned.scope) == ("rerun", "-", "run")
    elements = 3 * (5 * (15 + 15 + 32) + 32)
    assert planned.required == Compared(tensors=2 + 2 + 5, elements=elements, ranks=3, steps=5)
    unseen = required(sync="out-of-sight").rerun().required  # local gradients are not recorded
    elements = 3 * (5 * (15 + 32) + 32)
    assert unseen == Compared(tensors=2 + 5, elements=elements, ranks=3, steps=5)


def local_sgd(period: int) -> AcceptedDeviation:
    accepted = parse_deviation(f"local-sgd:{period}")
    assert accepted is not None
    return accepted


def test_local_sgd_owes_the_steps_between_averages_and_the_averages() -> None:
    """Five steps, an average after every second one: two for certain, three at the most."""
    between, after, agreement = required().combined(local_sgd(2))
    assert [(p.check, p.layer) for p in (between, after, agreement)] == [
        ("parameters", "bitwise"), ("parameters", "rounding"), ("agreement", "-"),
    ]  # fmt: skip
    elements = 45 * (5 - 3) + 45 * 5  # the optimizer's state is each rank's own at every step
    assert between.required == Compared(tensors=4, elements=elements, ranks=3, steps=5)
    assert (
        after.required == agreement.required == Compared(tensors=2, elements=90, ranks=3, steps=2)
    )
    bare = required(state=False).combined(local_sgd(2))[0].required
    assert bare == Compared(tensors=2, elements=90, ranks=3, steps=2)
    each_five = required().combined(local_sgd(5))[1].required
    assert each_five == Compared(tensors=2, elements=45, ranks=3, steps=1)


def test_a_warm_up_owes_the_mean_gradient_and_agreement() -> None:
    """Two of five steps; the phase is known, so averages come after steps 2 and 4."""
    accepted = parse_deviation("local-sgd:2:warmup=2:phase=0")
    assert accepted is not None
    mean, local = required().local_then_mean(2)
    assert [(p.layer, p.required.steps) for p in (mean, local)] == [("rounding", 2), ("bitwise", 3)]
    _, after, agreement = required().combined(accepted)
    assert (after.required.steps, agreement.required.steps) == (2, 4)
