"""Right losses and metrics that exchange by themselves pass; what shows nothing is unknown."""

import pytest

import distcheck
from distcheck.errors import UsageError

FILE = "tests.unusual.exchanging"
LOSSES = (
    "TimesWorld", "OneViewIsDetached", "CenterOfAll", "ConstantTable", "NormOfAll",
    "gathers_in_a_loop",
)  # fmt: skip


def verdicts(*names: str, form: str, world: int, dtype: str | None = "float32") -> dict[str, str]:
    found = {}
    for name in names:
        report = distcheck.verify(
            f"{FILE}:{name}", world=world, form=form, steps=2, batch=50, dtype=dtype, separate=False
        )
        found[name] = {case.verdict for case in report.cases}.pop()
        assert len(report.cases) == (1 if dtype else 2)
    return found


@pytest.mark.usefixtures("no_rerun")
def test_right_losses_pass() -> None:
    assert verdicts(*LOSSES, form="loss", world=3) == dict.fromkeys(LOSSES, "pass")


@pytest.mark.usefixtures("no_rerun")
def test_right_metrics_pass() -> None:
    names = ("EachInItsOwnOrder", "OneNumber")
    assert verdicts(*names, form="metric", world=3) == dict.fromkeys(names, "pass")


@pytest.mark.usefixtures("no_rerun")
def test_what_shows_no_exchange_is_unknown() -> None:
    assert verdicts("mean_over_samples", form="loss", world=2) == {"mean_over_samples": "unknown"}
    assert verdicts("AlwaysOne", form="metric", world=2) == {"AlwaysOne": "unknown"}


@pytest.mark.usefixtures("no_rerun")
def test_a_loss_times_the_number_of_ranks_is_said_and_not_accused() -> None:
    report = distcheck.verify(
        f"{FILE}:TimesWorld", world=2, form="loss", steps=2, dtype="float64", separate=False
    )
    (loss,) = [r for case in report.cases for r in case.checks if r.check == "loss"]
    assert (loss.verdict, "2x the single-process loss" in loss.reason) == ("pass", True)


def test_another_workload_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be combined with --as loss"):
        distcheck.verify(f"{FILE}:TimesWorld", world=2, form="loss", workload="mlp")


def test_an_object_that_takes_no_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="takes no samples"):
        distcheck.verify(f"{FILE}:TimesWorld", world=2, form="metric")
