"""The page of `train --html`: complete, inert, and made of files that anybody may have written."""

import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from distcheck.cli.commands.train import command
from distcheck.errors import UsageError
from distcheck.reports import training_report
from distcheck.reports.training_report import SCHEMA, TrainedCase, TrainedEpoch, TrainedRun
from distcheck.reports.training_report import read_training as read
from tests import documents


def runs(text: str, steps: int = 4) -> list[TrainedRun]:
    """One process and two ranks, with `text` wherever a file may have one."""
    epochs = [
        TrainedEpoch(
            loss=2.0 - n, accuracy=0.25 + n / 4, tested=100, mean_step_s=0.5,
            step_losses=tuple(2.0 - n - i / steps for i in range(steps)), step_s=(0.5,) * steps,
        )
        for n in range(2)
    ]  # fmt: skip
    broken = msgspec.structs.replace(epochs[1], loss=None, step_losses=(None,) * steps)
    shared = {"workload": text, "data": text, "seed": 0, "dtype": text}
    alone = TrainedCase(strategy="", world=1, batch=256, **shared)
    two = TrainedCase(strategy=text, world=2, batch=128, **shared)
    return [
        TrainedRun(schema=SCHEMA, case=alone, epochs=tuple(epochs)),
        TrainedRun(schema=SCHEMA, case=two, epochs=(epochs[0], broken)),
        TrainedRun(schema=SCHEMA, case=two, epochs=()),
    ]


def test_it_has_a_row_and_curves_for_every_run() -> None:
    page = training_report.render(runs("cnn"), version="0").replace("<wbr>", "")
    for words in (
        "3 runs: workload cnn", "one process", "The runs differ in batch", "1.0000", "50.00%",
        "not finite", "Loss by step", "Accuracy by epoch", "Seconds per step by step",
    ):  # fmt: skip
        assert words in page, words
    assert page.count('role="img"') == 3
    assert page.count('<path class="run0"') == page.count("<title>one process</title>") == 3
    long = training_report.render(runs("cnn", steps=900), version="0")
    assert "Each point is the mean of 6 steps." in long
    assert len(long) < 150_000


def test_nothing_of_a_hostile_file_is_markup() -> None:
    page = training_report.render(runs(documents.HOSTILE), version="0")
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("</style>") == 1
    assert "{{7*7}}" in page.replace("<wbr>", "")
    assert "default-src 'none'" in page
    assert "\x1b" not in page


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no measurements of distcheck train"),
        ("[" * 10_000, "has no measurements of distcheck train"),
        ('{"schema": "distcheck.training/1", "case": {}, "epochs": []}', "has no measurements"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read(path)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    other = msgspec.structs.replace(runs("cnn")[0], schema="distcheck.training/9")
    (tmp_path / "table.json").write_bytes(msgspec.json.encode(other))
    with pytest.raises(UsageError, match=r"has the schema 'distcheck\.training/9'"):
        read(tmp_path / "table.json")


def test_beside_needs_a_page(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_bytes(msgspec.json.encode(runs("cnn")[0]))
    words = ["--workload", "mlp", "--overlay", str(tmp_path / "table.json")]
    ran = CliRunner().invoke(command, words)
    assert isinstance(ran.exception, UsageError)
    assert "pass --html FILE" in str(ran.exception)


def test_lines_have_names_and_axes_round_numbers() -> None:
    page = training_report.render(runs("cnn"), version="0").replace("<wbr>", "")
    assert "one process; cnn, 2 ranks (2)" in page or ">one process</text>" in page
    shown = re.findall(r">([^<>]*)</text>", page)
    assert {"0%", "100%", "0.5", "1", "2"} <= set(shown)
