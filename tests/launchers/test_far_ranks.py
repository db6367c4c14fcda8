"""What the front knows of ranks that it did not fork: their data, and whether they still work."""

from pathlib import Path

import pytest

from tests import real_files
from tests.launchers.processes import QUICK, finish, start_warm
from tests.launchers.test_one_machine import by_hand
from tests.unit.test_datasets import needs_torchvision

# Rank 1 computes for one and a half deadlines, in which nobody else does anything.
SLOW = """
import time
import torch.distributed as dist

def slow(model, step):
    until = time.monotonic() + (6.0 if step.rank == 1 and step.index == 0 else 0.0)
    while time.monotonic() < until:
        pass
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= step.world_size
"""


@pytest.mark.sweep
def test_a_far_rank_that_computes_has_not_hung(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    quick = ("--strategy", "slow.py:slow", *QUICK[2:], "--deadline", "4")
    ends = finish([start_warm(c, tmp_path) for c in by_hand(2, "--world", "2", quick=quick)])
    assert [code for code, _, _ in ends] == [0, 0], ends


def _on_two_machines(tmp_path: Path, *, differ: bool) -> list[tuple[int, str, str]]:
    quick = ("--strategy", "allreduce", *QUICK[2:], "--data", "mnist", "--data-dir", "files")
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        real_files.write_mnist(folder / "files", packed=False)
    if differ:
        (labels,) = (folders[1] / "files").rglob("train-labels-idx1-ubyte")
        changed = bytearray(labels.read_bytes())
        changed[-1] ^= 1
        labels.write_bytes(changed)
    commands = by_hand(2, "--world", "2", quick=quick)
    return finish([start_warm(c, f) for c, f in zip(commands, folders, strict=True)])


@pytest.mark.sweep
@needs_torchvision
def test_data_is_alike_wherever_it_lies(tmp_path: Path) -> None:
    ends = _on_two_machines(tmp_path, differ=False)
    assert [code for code, _, _ in ends] == [0, 0], ends


@needs_torchvision
def test_data_of_which_one_label_differs_is_other_data(tmp_path: Path) -> None:
    ends = _on_two_machines(tmp_path, differ=True)
    assert [code for code, _, _ in ends] == [3, 3], ends
    assert "rank 1 on" in ends[0][2], ends[0][2]
    assert "has different files of mnist than rank 0" in ends[0][2], ends[0][2]
