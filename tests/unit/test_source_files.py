"""What the text of a strategy mentions, which nothing is imported to find out."""

from pathlib import Path

import pytest

from distcheck.plan.source_files import mentions
from distcheck.verification.run import _USES_COMPILER


@pytest.mark.parametrize(
    ("spec", "uses"),
    [
        ("ddp", True),
        ("fsdp", True),
        ("zero1", True),
        ("distcheck_strategies.ddp:DDP", True),
        ("allreduce", False),
        ("no.such.module:f", False),
        ("none.py:f", False),
        ("nul\0.py:f", False),
        ("", False),
    ],
)
def test_what_uses_the_compiler(spec: str, uses: bool) -> None:
    assert mentions(_USES_COMPILER, spec) == uses


def test_modules_beside_a_file_count(tmp_path: Path) -> None:
    (tmp_path / "sync.py").write_text("raise SystemExit('imported')\nfrom beside import wrap\n")
    (tmp_path / "beside.py").write_text("x = 1\n")
    spec = f"{tmp_path / 'sync.py'}:wrap"
    assert not mentions(_USES_COMPILER, spec)
    (tmp_path / "beside.py").write_text("from torch.nn.parallel import DistributedDataParallel\n")
    assert mentions(_USES_COMPILER, spec)
