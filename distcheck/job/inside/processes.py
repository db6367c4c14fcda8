"""Copies of a replay that are processes of their own, where the script uses a GPU: a fork loses it.

Each runs the script from its beginning, in a copy of the folder, and is what it is at every step.
Every step starts from the recorded state, so a copy waits for no other: it writes what it has
computed at a step, takes the step that was recorded, and goes on. What a GPU computes differently
from run to run, and kernels that are chosen by measuring, are then in what copies differ by.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import torch

from distcheck.job import running, settings
from distcheck.job.copying import Copy
from distcheck.job.inside import tensors
from distcheck.job.inside.forks import Written, how_ended
from distcheck.job.inside.marking import MARK
from distcheck.job.settings import JobSettings, Role
from distcheck.machine import devices

_PATIENCE_S = 300.0  # for a copy's next step: it may have to start Python, and measure kernels

Key = tuple[Role, str]


@dataclass
class _Copy:
    """A process, or one that is still to be started; its folder has its settings and results."""

    folder: Path
    process: "subprocess.Popen[bytes] | None" = None
    begun: float = 0.0

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def is_over(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def result(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.safetensors"

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder / "folder", ignore_errors=True)


class Processes:
    """Starts copies, as many at once as there is room for where each takes `gpu_bytes` of a GPU's
    memory, as a rank of the job did; and reads what they write.
    """

    def __init__(self, folder: Path, asked: JobSettings, gpu_bytes: int) -> None:
        self._folder, self._asked, self._gpu_bytes = folder, asked, gpu_bytes
        self._project = Path(asked.project)
        # Each is watched as the rank that it is.
        self._environment = {k: v for k, v in os.environ.items() if k != MARK}
        self._here = Path.cwd().relative_to(self._project)
        self._copies: dict[Key, _Copy] = {}
        self.why: dict[Role, str] = {}  # of copies that failed
        if asked.role is None:  # before the script writes anything
            shutil.copytree(self._project, folder / "clean", symlinks=True)

    def run(
        self, roles: Sequence[Role], step: int, mode: str, *, reads: bool = True
    ) -> "Role | Written":
        """What each copy wrote of a step, None of one that failed. Others are ended. What a rank's
        own copy does, it does in every mode.
        """
        keys = [(msgspec.structs.replace(r, step=-1), mode if r.rank < 0 else "") for r in roles]
        for key in [key for key in self._copies if key not in keys]:
            self._copies.pop(key).end()
        for key in keys:
            if key not in self._copies:
                name = f"copy-{mode.replace(' ', '-')}-{key[0].rank}-{key[0].draw}"
                self._copies[key] = _Copy(self._folder / name)
        begun, most = time.monotonic(), self._most
        while missing := [key for key in keys if not self._has(key, step)]:
            running = sum(copy.runs for copy in self._copies.values())
            for key in missing:
                copy = self._copies[key]
                if copy.process is None and running < most:
                    self._start(key)
                    running += 1
                elif copy.runs and time.monotonic() - max(begun, copy.begun) > _PATIENCE_S:
                    copy.end()
            time.sleep(0.01)
        return {role: self._read(key, step) for role, key in zip(roles, keys, strict=True)}

    @cached_property
    def _most(self) -> int:
        """How many at once: asked when the model is on the GPU, and no copy is there."""
        return devices.copies_beside(self._gpu_bytes)

    def keep_spare(self) -> bool:
        """Copies measure at every step."""
        return False

    release_spare = keep_spare

    def end_spare(self) -> None:
        """There is none."""

    def read(self, roles: Sequence[Role]) -> Written:
        return {}

    def _has(self, key: Key, step: int) -> bool:
        copy = self._copies[key]
        return copy.is_over or copy.result(step).exists()

    def _start(self, key: Key) -> None:
        copy, (role, mode) = self._copies[key], key
        place = copy.folder / "folder"
        shutil.copytree(self._folder / "clean", place, symlinks=True)
        asked = msgspec.structs.replace(self._asked, role=role, role_mode=mode, project=str(place))
        file = settings.write(asked, copy.folder)
        words = Copy(self._project, place).words(sys.orig_argv)
        nothing = subprocess.DEVNULL
        copy.process = subprocess.Popen(
            words, cwd=place / self._here, env={**self._environment, settings.VARIABLE: str(file)},
            stdin=nothing, stdout=nothing, stderr=nothing,
        )  # fmt: skip
        copy.begun = time.monotonic()

    def _read(self, key: Key, step: int) -> dict[str, torch.Tensor] | None:
        copy, role = self._copies[key], msgspec.structs.replace(key[0], step=step)
        self.why.pop(role, None)
        found = tensors.taken_from(copy.result(step))
        if found is None:
            raised = running.raised_in(copy.folder)
            code = copy.process.returncode if copy.process is not None else 0
            self.why[role] = raised[0][1] if raised else how_ended(code)
        return found

    def leave(self, role: Role, found: dict[str, torch.Tensor], step: int) -> None:
        """In a copy: writes what it has computed at a step."""
        tensors.write(found, _Copy(self._folder).result(step))
