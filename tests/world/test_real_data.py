"""VGG11 and others on files in the real formats, from the folder to the verdict."""

from pathlib import Path

import pytest

import distcheck
from distcheck.errors import CannotRunError, UsageError
from tests import real_files
from tests.unit.test_datasets import needs_torchvision


@needs_torchvision
@pytest.mark.vgg
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        pytest.param("allreduce", marks=pytest.mark.sweep),
        pytest.param("gather_scatter", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.usefixtures("no_rerun")
def test_vgg11_on_cifar10_goes_end_to_end(tmp_path: Path, strategy: str) -> None:
    real_files.write_cifar10(tmp_path)
    report = distcheck.verify(
        strategy, workload="vgg11", data="cifar10", data_dir=tmp_path, world=2, batch=16, steps=1
    )
    (case,) = report.cases
    assert {r.verdict for r in case.checks} == {"pass"}
    assert {r.layer for r in case.checks if r.check == "gradients"} == {
        "bitwise", "rounding", "full batch float32",
    }  # fmt: skip
    assert case.case.data == "cifar10"
    assert any("not the published CIFAR-10" in note for note in case.notes)


@needs_torchvision
@pytest.mark.usefixtures("no_rerun")
def test_mnist_trains_the_mlp_and_the_cnn(tmp_path: Path) -> None:
    real_files.write_mnist(tmp_path / "MNIST" / "raw", packed=True)
    report = distcheck.verify(
        "gather_scatter", workload=["mlp", "cnn"], data="mnist", data_dir=tmp_path, world=3
    )
    assert report.verdict == "pass"
    assert {c.case.workload for c in report.cases} == {"mlp", "cnn"}


@needs_torchvision
def test_mnist_does_not_fit_vgg11(tmp_path: Path) -> None:
    real_files.write_mnist(tmp_path, packed=False)
    with pytest.raises(UsageError, match="vgg11 takes 3x32x32 images, not 1x28x28"):
        distcheck.verify("ddp", workload="vgg11", data="mnist", data_dir=tmp_path)


@needs_torchvision
def test_files_that_are_not_there_cannot_be_verified_on(tmp_path: Path) -> None:
    with pytest.raises(CannotRunError, match="cifar10 is not in"):
        distcheck.verify("ddp", data="cifar10", data_dir=tmp_path)
