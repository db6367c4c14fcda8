"""Starts the reference: the script of rank 0 as one process, in a copy of the job's folder."""

import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from distcheck.errors import UsageError
from distcheck.job import running, settings
from distcheck.job.reading import MOST_BYTES, Recording
from distcheck.job.settings import Replayed, Settings
from distcheck.records.decoding import decode_json, read_bounded

MOST_COPIED = 1 << 30
MOST_FILES = 20_000
_LEFT_OUT = (".git", "__pycache__", ".distcheck", "node_modules", ".venv", "venv")
_ONE_RANK = {
    "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "0", "ROLE_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
# Autograd has a thread for each GPU that it sees, and a fork loses it.
_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
_OF_MPI = "OMPI_"


class NoReferenceError(Exception):
    """Why the reference cannot be run; its text is for the report."""


@dataclass(frozen=True)
class Reference:
    """What the script reached as one process; `why` says why ranks were replayed one by one."""

    folder: Path
    replayed: Replayed

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """All that was written of one step. Raises UsageError where that is damaged."""
        file = self.folder / f"replay-{step:06d}.safetensors"
        try:
            return load(read_bounded(file, min(file.stat().st_size, MOST_BYTES)))
        except (OSError, ValueError, SafetensorError) as error:
            raise UsageError(f"{file} is damaged: {error}; run distcheck job again") from error


def copy_folder(target: Path) -> str:
    """Copies the folder that the job starts in; why it cannot be copied, or ""."""
    here, own = Path.cwd(), target.parent  # which may be within, where TMPDIR is
    size = 0
    for count, file in enumerate(_files(here, own)):
        size += 0 if file.is_symlink() else file.stat().st_size
        if count > MOST_FILES or size > MOST_COPIED:
            return (
                f"the folder {here} holds more than {MOST_FILES:,} files or {MOST_COPIED >> 30} "
                "GiB, and the reference runs in a copy; start the job in a smaller folder"
            )
    try:
        shutil.copytree(here, target, symlinks=True, ignore=functools.partial(_ignored, own))
    except (OSError, shutil.Error) as error:
        return f"the folder {here} cannot be copied for the reference: {error}"
    return ""


def _ignored(own: Path, folder: str, names: list[str]) -> set[str]:
    paths = {name: Path(folder, name) for name in names}
    return {
        name for name, path in paths.items() if name in _LEFT_OUT or path == own or path.is_socket()
    }


def _files(folder: Path, own: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [n for n in folders if n not in _LEFT_OUT and Path(parent, n) != own]
        for name in names:
            file = Path(parent, name)
            if os.path.lexists(file):
                yield file


def replay(job: Recording, copy: Path, folder: Path, *, on_cpu: bool = False) -> Reference:
    """Runs rank 0's script as one process. Raises NoReferenceError where that cannot be done."""
    first = job.ranks[0]
    words = list(first.arguments)
    if "-c" in words[:3] or any("multiprocessing" in word for word in words):
        raise NoReferenceError(
            "the script starts its ranks itself, so it cannot be run as one of them; start it by "
            "torchrun"
        )
    if first.backend == "mpi":
        raise NoReferenceError("the reference cannot stand in for MPI's own start of ranks")
    if not all(record.whole for record in job.at(job.steps[0])):
        raise NoReferenceError(
            "the first step was beyond --budget, so its parameters were not kept"
        )
    words = in_copy(words, Path.cwd(), copy)
    in_processes = _is_lost_in_a_fork(first.device)
    asked = Settings(
        mode="replay", steps=len(job.steps), recording=str(job.folder),
        on_cpu=on_cpu, in_processes=in_processes,
    )  # fmt: skip
    variables = {k: v for k, v in first.variables.items() if not k.startswith(_OF_MPI)}
    variables |= {} if in_processes else _WITHOUT_GPUS
    file = settings.write(asked, folder)
    ran = running.run_kept(
        words, file, folder=copy, variables={**variables, **_ONE_RANK},
        without=(_OF_MPI, "PMIX_", "TORCHELASTIC_"),
    )  # fmt: skip
    return _read(folder, ran)


def _is_lost_in_a_fork(device: str) -> bool:
    return device != "cpu"


def in_copy(words: Sequence[str], here: Path, copy: Path) -> list[str]:
    """Paths into the folder `here` lead into its copy."""
    found = []
    for word in words:
        path = Path(word)
        inside = (
            path.is_absolute() and path.is_relative_to(here) and (copy / path.relative_to(here))
        )
        found.append(str(inside) if inside and inside.exists() else word)
    return found


def _read(folder: Path, ran: running.Ran) -> Reference:
    if (folder / "defect").exists():
        said = (folder / "defect").read_text(errors="backslashreplace").strip().rpartition("\n")[2]
        raise NoReferenceError(f"the reference run failed: {said[:300]}")
    file = folder / "replayed.json"
    if not file.exists():
        why = ran.raised[0][1][:300] if ran.raised else f"it ended with exit code {ran.code}"
        raise NoReferenceError(f"as one process the script fails before its first step: {why}")
    try:
        replayed = decode_json(read_bounded(file), Replayed)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{file} is damaged: {error}; run distcheck job again") from error
    if not replayed.steps:
        raise NoReferenceError(replayed.failure or "as one process the script makes no step")
    return Reference(folder, replayed)
