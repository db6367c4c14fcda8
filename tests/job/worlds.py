"""Whole jobs of two ranks, and their reference, in forks of this process, which has torch already:
what `distcheck job` starts as processes, for tests that look at many scripts.
"""

import gc
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from unittest.mock import patch

import torch
import torch._dynamo  # which the first optimizer would import, in each fork

from distcheck.job import command, perturbed_runs, replaying, settings
from distcheck.job.copying import ProjectCopy
from distcheck.job.inside.install import install
from distcheck.job.judging import judge
from distcheck.job.options import JobOptions
from distcheck.job.replaying import NoReferenceError, Reference
from distcheck.job.running import CommandResult
from distcheck.job.settings import JobSettings, ReplayResult
from distcheck.recordings.jobs import reading
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.records import CaseReport
from distcheck.records.decoding import decode_json
from distcheck.worlds import pinning
from tests.launchers.processes import free_port

WORLD = 2


def _forked(script: Path, words: tuple[str, ...], file: Path, variables: dict[str, str]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    gc.freeze()  # what this process holds may wait for threads that are not in a fork
    try:
        os.environ.update(variables)
        os.chdir(script.parent)
        sys.argv = sys.orig_argv = [str(script), *words]
        for number, name in ((1, "printed"), (2, "said")):
            os.dup2(os.open(file.parent / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        torch.set_num_threads(1)  # threads of this process are not in a fork
        if (pins := variables.get(pinning.VARIABLE)) is not None:
            pinning.begin(pins, file.parent)
        install(str(file))
        if pins is not None:
            pinning.pin_torch()
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        (file.parent / "raised").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(code)


def _ended(children: list[int], folder: Path) -> None:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for name in ("raised", "defect"):
        assert not (folder / name).exists(), (folder / name).read_text()
    assert not any(codes), (folder / "said").read_text()


def record(
    script: Path, folder: Path, *words: str, world: int = WORLD,
    variables: Mapping[str, str] = MappingProxyType({}), **asked: int | bool,
) -> JobRecording:  # fmt: skip
    """What the ranks of a script have recorded."""
    folder.mkdir(parents=True)
    file = settings.write(JobSettings(**{"steps": 3, **asked}), folder)  # type: ignore[arg-type]
    port = str(free_port())
    children = [
        _forked(script, words, file, {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", **variables,
        })
        for rank in range(world)
    ]  # fmt: skip
    _ended(children, folder)
    return reading.read_recording(folder)


def replay(job: JobRecording, script: Path, folder: Path, *words: str, modules: bool) -> Reference:
    """What the script reaches as one process. Raises NoReferenceError."""
    file = settings.write(
        JobSettings(mode="replay", steps=len(job.steps), recording=str(job.folder), modules=modules,
                    joins=bool(job.joined)), folder,
    )  # fmt: skip
    _ended([_forked(script, words, file, replaying._ONE_RANK)], folder)
    said = decode_json((folder / "replayed.json").read_bytes(), ReplayResult)
    if not said.steps:
        raise NoReferenceError(said.failure, said.retry)
    return Reference(folder, said)


def judged(
    script: Path, folder: Path, *words: str, modules: bool = True, steps: int = 3,
    change: Callable[[JobOptions], JobOptions] = lambda asked: asked,
) -> CaseReport:  # fmt: skip
    record(script, folder / "job", *words, modules=modules, steps=steps)
    job = perturbed_runs.read_whole(folder / "job", folder / "whole")
    asked = change(JobOptions(words=("python", str(script)), steps=steps, modules=modules))

    def replayed(job: JobRecording, copy: ProjectCopy, there: Path, **_: object) -> Reference:
        return replay(job, script, there, *words, modules=modules)

    copy = ProjectCopy(script.parent, folder)  # which is not looked at
    with patch.object(replaying, "replay", replayed):
        job, reference, missing = command._replay(asked, job, copy, folder / "reference")
    return judge(asked, job, CommandResult(0, ()), reference, missing)
