"""Times on the command line."""

import click
import pytest
from click.testing import CliRunner

from distcheck.cli.commands import job
from distcheck.cli.options import SECONDS
from distcheck.errors import UsageError
from tests.optional import needs


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("30", 30.0), ("30s", 30.0), ("500ms", 0.5), ("1.5m", 90.0), ("2 min", 120.0), ("1H", 3600.0),
     ("1e-3", 0.001), ("-3", -3.0), ("inf", float("inf"))],
)  # fmt: skip
def test_a_time_has_a_unit_or_is_in_seconds(given: str, seconds: float) -> None:
    assert SECONDS.convert(given, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["", "s", "3 days", "1m30s", "1.2.3", "\u0663s"])
def test_other_words_are_refused(given: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a duration; pass seconds, or 30s, 500ms"):
        SECONDS.convert(given, None, None)


def test_a_time_must_be_above_zero() -> None:
    asked = ["--deadline", "0s", "--", "python", "--deadline-s", "train.py"]
    error = CliRunner().invoke(job.command, asked, standalone_mode=False).exception
    assert isinstance(error, UsageError)
    assert str(error) == "--deadline must be above 0 and at most 1000000"


@needs("simulated")
def test_worlds_of_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    from distcheck.addons.simulated import scale_command as scale

    seen = []
    monkeypatch.setattr(
        "distcheck.addons.simulated.scale.plan_scale",
        lambda request, worlds, orders: seen.append(worlds) or 1 / 0,
    )
    CliRunner().invoke(scale.command, ["--strategy", "allreduce", "--world", "2,4"])
    assert seen == ["2,4"]
