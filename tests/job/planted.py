"""The examples of whole jobs, and the bugs that are planted in them."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[2] / "examples" / "jobs"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))


class Bug(NamedTuple):
    name: str
    script: str
    find: str
    put: str
    cause: str
    where: str = ""  # the line that must be named; not looked at where it is left out
    options: tuple[str, ...] = ()  # without --strict a remark, where that is the cause


# What advice takes for granted (first), and what a script has if that is so (second).
PRESUMES = {
    r"the wrapped model|\bDDP\b": r"DistributedDataParallel|DDP|fully_shard|prepare\(",
    r"not model\.module": r"\.module\b",
    r"(leave|set|inside) no_sync\(\)": r"no_(backward_)?sync|require_backward_grad_sync",
    r"\bscaler\.|GradScaler": r"[Ss]caler",
    r"\bscheduler\.|the scheduler": r"[Ss]ched|LR\(|lr_lambda",
    r"call sampler\.set_epoch": r"[Ss]ampler", r"the DataLoader": r"DataLoader",
    r"(leave|for|before) clipping|the clip": r"clip", r"the checkpoint": r"load|resume",
    r"micro-batch": r"accum|micro|no_sync|%|chunk|split|zip",
}  # fmt: skip


def unfounded(case: Mapping[str, Any], script: str) -> list[str]:
    """The advice in a report that mentions something that the script does not contain."""
    said = [f"{one['suggestion']} {one['cause']}" for one in case["diagnosis"]]
    wrong = [
        one
        for one in said
        for presumed, needed in PRESUMES.items()
        if re.search(presumed, one) and not re.search(needed, script)
    ]
    return [*dict.fromkeys(wrong)]


BUGS = [Bug(**bug) for bug in tomllib.loads((FOLDER / "planted.toml").read_text())["bug"]]


def plant(bug: Bug, folder: Path) -> Path:
    """The wrong script, in a folder of its own."""
    right = (FOLDER / bug.script).read_text()
    assert right.count(bug.find) == 1, f"{bug.name}: the edit fits {right.count(bug.find)} places"
    wrong = folder / bug.script
    wrong.write_text(right.replace(bug.find, bug.put))
    return wrong
