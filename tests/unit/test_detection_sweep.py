"""The parts of bench/detection.py that need no world."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.optional import needs

pytestmark = needs("selftest")
BENCH = Path(__file__).parents[2] / "bench" / "detection.py"


@pytest.fixture(scope="module")
def detection() -> ModuleType:
    spec = importlib.util.spec_from_file_location("detection_sweep", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("smallest", [None, 0, 1, 7, 22])
def test_bisection_of_bits(detection: ModuleType, smallest: int | None) -> None:
    asked: list[int] = []

    def caught(bit: int) -> bool:
        asked.append(bit)
        return smallest is not None and bit >= smallest

    assert detection.smallest_caught(caught, 0, 22, grows=True) == smallest
    assert len(asked) <= 5


@pytest.mark.parametrize("smallest", [None, 1, 12, 23])
def test_bisection_of_exponents(detection: ModuleType, smallest: int | None) -> None:
    def caught(exponent: int) -> bool:
        return smallest is not None and exponent <= smallest

    assert detection.smallest_caught(caught, 1, 23, grows=False) == smallest


def test_a_sweep_that_was_killed_goes_on(detection: ModuleType, tmp_path: Path) -> None:
    log = detection.Log(tmp_path, "correct")
    log.add({"key": "a", "n": 1}, {"key": "a", "n": 2})
    file = tmp_path / "correct.jsonl"
    file.write_text(file.read_text() + '{"key": "b", "n"')  # killed in the middle of a line
    again = detection.Log(tmp_path, "correct")
    assert again.keys == {"a"}
    again.add({"key": "b", "n": 3})
    assert [json.loads(line)["n"] for line in file.read_text().splitlines()] == [1, 2, 3]


def test_the_table_shows_every_false_alarm(detection: ModuleType, tmp_path: Path) -> None:
    about = {"key": "k", "world": 3, "seed": 0, "file": "ring", "replay": "distcheck verify"}
    log = detection.Log(tmp_path, "correct")
    log.add({**about, "name": "fine", "verdict": "passed", "detail": ""})
    log.add(
        {**about, "name": "ring-w3", "verdict": "false positive", "detail": "gradients bitwise"}
    )
    detection.Log(tmp_path, "limits").add(
        {"key": "scaled, mlp", "caught": {"gradients rounding": 20}}
    )
    text = "\n".join(detection.show(tmp_path))
    assert "2 cases (worlds [3], 1 seeds, 1 strategies): 1 passed, 1 false positives" in text
    assert "false positive: ring-w3: gradients bitwise\n    distcheck verify" in text
    assert "scaled, mlp: gradients rounding 2^-20" in text
