"""Two recordings in which modules were watched: the first that parts, by more than rounding or by a
bit.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from distcheck.errors import UsageError
from distcheck.judge.divergence.job_recordings import JobComparison, compare_recordings
from distcheck.judge.divergence.modules import OF_REFERENCE, OF_TWO, StepInBothRuns, first_wrong
from distcheck.judge.divergence.noise_floor import measure_noise_floor
from distcheck.recordings.jobs import reading
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.watched import WatchedCalls, WatchedStep
from distcheck.records.run_facts import ModuleComparison
from tests.job.recordings import chain
from tests.job.worlds import record

TRAIN = """
import sys, torch
import torch.nn.functional as F
how = sys.argv[1]
torch.manual_seed(0)
noise = torch.Generator()
if how == "noise": noise.seed()

class Middle(torch.nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        if how == "noise": h = h + 1e-7 * torch.randn(h.shape, generator=noise)
        if how == "reordered": h = (h * 3) / 3
        if how == "other": h = 1.001 * h
        return h

model = torch.nn.Sequential(torch.nn.Linear(4, 8), Middle(8, 8), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    drawn = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 4, generator=drawn), torch.randint(0, 3, (8,), generator=drawn)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    (2 * loss if how == "loss" else loss).backward()
    optimizer.step()
"""


def trained(folder: Path, how: str, **asked: int | bool) -> JobRecording:
    script = folder / "train.py"
    script.write_text(TRAIN)
    name = f"{how}-{len([*folder.iterdir()])}"
    return record(script, folder / name, how, world=1, modules=True, kept=True, **asked)


def walked(folder: Path, how: str) -> JobComparison:
    one, two = trained(folder, "as it is"), trained(folder, how)
    floor = measure_noise_floor(one, [trained(folder, "as it is", draw=draw) for draw in (1, 2)])
    assert any(name.startswith("module/") for name in floor.steps[0])
    return compare_recordings(one, two, [(floor, 0)])


FIRST = {
    "noise": "1 (Middle): its inputs are bit-identical, but its output is not",
    "reordered": "1 (Middle): its inputs are bit-identical, but its output is not",
    "other": "1 (Middle): its inputs agree, but its output does not",
}


@pytest.mark.sweep
@pytest.mark.parametrize("how", FIRST)
def test_the_first_module_that_parts_is_named(how: str, tmp_path: Path) -> None:
    walk = walked(tmp_path, how)
    found = walk.by_module()
    assert found is not None
    assert found.first.startswith(f"first divergent module: {FIRST[how]}"), found.first
    assert (found.name, found.step) == ("1", 0)
    assert (walk.result().beyond is not None) == (how == "other")


@pytest.mark.sweep
def test_no_module_is_named_where_the_loss_is_another(tmp_path: Path) -> None:
    found = walked(tmp_path, "loss").by_module()
    assert found is not None
    assert not found.is_found
    assert found.first.endswith("check the loss"), found.first


# -- made up -------------------------------------------------------------------------------------


def compared(
    one: WatchedStep, two: WatchedStep, *, fits: bool = False, spread: float = 1e-6
) -> ModuleComparison:
    both = StepInBothRuns(one, two, lambda name, gradient: spread, 2**-24, fits=fits)
    found = first_wrong([(0, 0, both)], OF_REFERENCE if fits else OF_TWO)
    assert found is not None
    return found


RIGHT = [(1.0, 4.0), (2.0, 3.0), (3.0, 2.0), (4.0, 1.0)]


def changed(*places: tuple[int, int, float]) -> list[tuple[float, float]]:
    values = [list(one) for one in RIGHT]
    for place, kind, value in places:
        values[place][kind] = value
    return [(one[0], one[1]) for one in values]


@pytest.mark.parametrize(
    ("places", "name"),
    [
        ([], ""),
        ([(2, 0, 3.1), (3, 0, 4.2)], "b"),
        ([(2, 0, 3.0 + 1e-7)], ""),  # within the bound
        ([(2, 0, 3.0 + 3e-6), (3, 0, 4.0 + 1e-5)], ""),  # which it nearly was not
        ([(0, 0, 1.1), (1, 0, 2.1)], ""),  # what the first is given is another
        ([(0, 1, 4.4), (1, 1, 3.3)], "b"),  # backward: b hands it back
        ([(3, 1, 1.1), (2, 1, 2.2)], ""),  # the loss does
    ],
)
def test_the_first_wrong_module(places: list[tuple[int, int, float]], name: str) -> None:
    found = compared(chain(*changed(*places)), chain(*RIGHT))
    assert (found.name, found.is_found) == (name, bool(name)), found.first


def test_gradients_may_have_one_factor_beside_a_reference() -> None:
    twice = [(value, 2 * gradient) for value, gradient in RIGHT]
    assert compared(chain(*twice), chain(*RIGHT), fits=True).first.startswith("no module")
    assert "check the loss" in compared(chain(*twice), chain(*RIGHT)).first
    twice[1] = (2.0, 3.0)  # and this one has not
    assert compared(chain(*twice), chain(*RIGHT), fits=True).name == "b"


def test_modules_that_one_alone_has_are_not_compared() -> None:
    one, two = chain(*RIGHT), chain(*RIGHT[:3])
    found = compared(one, two)
    assert (found.compared, found.is_found) == (2, False)
    assert [m.state for m in found.modules] == ["same", "same", "unseen"]


HARMS: dict[str, Callable[[WatchedCalls], WatchedCalls]] = {
    "a place that is not there": lambda one: msgspec.structs.replace(one, backward=(99,)),
    "another number of tensors": lambda one: msgspec.structs.replace(one, tensors=one.tensors[:1]),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_damaged_is_an_error_in_one_sentence(harm: str, tmp_path: Path) -> None:
    job = trained(tmp_path, "as it is", steps=1)
    record = job.records[0, 0]
    assert record.modules is not None
    job.records[0, 0] = msgspec.structs.replace(record, modules=HARMS[harm](record.modules))
    with pytest.raises(UsageError, match="is damaged: its modules have other tensors"):
        job.modules(0, 0)
    assert reading.read_recording(job.folder).modules(0, 0) is not None
