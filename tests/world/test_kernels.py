"""Verdicts and causes do not depend on the kernels that a CPU selects, nor on a job's threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LAYOUTS = "tests/world/test_layouts.py"
ZOO = "tests/mutants/test_zoo.py::test_mutant_is_caught"
# Where rounding is near what is judged: gradients that cancel, a dtype, noise, a factor, an order.
FEW = (
    f"{LAYOUTS}::test_gradients_and_losses_that_cancel_are_not_accused_of_their_rounding",
    *(
        f"{ZOO}[{name}]"
        for name in ("shorter_than_accepted", "adds_noise", "clips_before_the_sync",
                     "MeanOfGroupMeans", "multiplies_by_the_reciprocal")
    ),
)  # fmt: skip
ALL = ("tests/mutants", "tests/job", "tests/unusual", "tests/adapted", "tests/world")
# ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA by the least that they need.
KERNELS = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
ORDER = ["DEFAULT", "AVX2", "AVX512"]


def missing(kernels: str) -> str:
    """Return why this machine cannot run or need not run the tests with these kernels."""
    own = torch.backends.cpu.get_cpu_capability()
    if own not in ORDER or ORDER.index(kernels.upper()) > ORDER.index(own):
        return f"this CPU runs {own}, without {kernels}"
    return ""


def run(tests: tuple[str, ...], kernels: str, **more: str) -> None:
    """Run tests in a process with these kernels; fails with its output."""
    if why := missing(kernels):
        pytest.skip(why)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, **KERNELS[kernels], **more}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    ran = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr[-2_000:]


def test_a_few_have_the_same_causes_with_the_plainest_kernels() -> None:
    run(FEW, "default")


@pytest.mark.sweep
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_all_have_the_same_causes(kernels: str, threads: str) -> None:
    others = ("--ignore", "tests/world/test_kernels.py", "-n", "auto")
    run((*ALL, *others), kernels, OMP_NUM_THREADS=threads)
