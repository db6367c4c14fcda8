"""Starts the reference: the script of rank 0 as one process, in a copy of the project."""

import dataclasses
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from distcheck.job import running, settings
from distcheck.job.copying import Copy
from distcheck.job.settings import JobSettings, Replayed, ReplayedStep
from distcheck.machine.resources import KEEPS_FREED_MEMORY
from distcheck.recordings.jobs.reading import JobRecording, TensorCache, read_tensors
from distcheck.recordings.jobs.records import read_own

_MOST_PARENTS = 8
# Options that say how many ranks there are, or how many machines or GPUs.
_COUNTS = re.compile(
    r"--?(?:dist[-_])?(?:world(?:[-_]size)?|n(?:um)?[-_]?(?:nodes|gpus?|processes|procs|ranks|devices)"
    r"|(?:tp|dp|pp|cp|ep|sp|(?:tensor|data|pipeline|context|sequence|expert|model)(?:[-_]parallel)?)"
    r"(?:[-_](?:size|degree))?|nproc(?:[-_]per[-_]node)?|(?:n?gpus|devices)(?:[-_]per[-_]node)?|ranks|nodes)",
    re.IGNORECASE,
)
_ONE_RANK = {
    "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "0", "ROLE_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
# Autograd has a thread for each GPU that it sees, and a fork loses it.
_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
_OF_MPI = "OMPI_"
# Of torchrun's agent, which is gone; scripts ask for the others, as is_torchelastic_launched does.
_OF_AGENT = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")


class NoReferenceError(Exception):
    """Why the reference cannot be run; its text is for the report. `joins`: it may run with the
    micro-batches of a step as one forward pass.
    """

    def __init__(self, why: str, *, joins: bool = False) -> None:
        super().__init__(why)
        self.joins = joins


@dataclass(frozen=True)
class Reference:
    """What the script reached as one process; `replaced`: options of its command that say one."""

    folder: Path
    replayed: Replayed
    replaced: tuple[str, ...] = ()
    _kept: TensorCache = field(default_factory=TensorCache)

    def until(self, steps: tuple[ReplayedStep, ...]) -> "Reference":
        fewer = msgspec.structs.replace(self.replayed, steps=steps)
        return dataclasses.replace(self, replayed=fewer)

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """All that was written of one step. Raises UsageError where that is damaged."""
        file = self.folder / f"replay-{step:06d}.safetensors"
        return self._kept.get(step, lambda: read_tensors(file))


def replay(
    job: JobRecording, copy: Copy, folder: Path, *, on_cpu: bool = False, weights: str = "",
    command: str = "", deadline_s: float = 300.0, modules: bool = False,
) -> Reference:  # fmt: skip
    """Runs rank 0's script as one process, or the `command` that does. Raises NoReferenceError
    where that cannot be done.
    """
    first = job.ranks[0]
    if first.backend == "mpi":
        raise NoReferenceError("ranks started through MPI cannot be replaced by a single process")
    if not all(record.whole for record in job.at(job.steps[0])):
        raise NoReferenceError("the first step exceeded --budget, so its parameters were not kept")
    there = Path.cwd() if command else Path(first.folder)
    place = copy.of(there)
    if place is None or not place.is_dir():
        raise NoReferenceError(
            f"ranks work in {there}, which is not in the copied folder {copy.project}; start the "
            "job there"
        )
    is_forked = first.process and not (job.folder / f"python-{first.process}").exists()
    spawned = bool(is_forked) or _is_spawned(first.arguments)
    words = shlex.split(command) or list(_of_launcher(job) if spawned else first.arguments)
    sizes = {job.processes, *(axis.size for axis in first.axes)}
    words, replaced = (words, ()) if command else of_one(words, *sizes)
    in_processes = first.device != "cpu"  # a fork loses what a GPU has
    asked = JobSettings(
        mode="replay", steps=len(job.steps), recording=str(job.folder), modules=modules,
        joins=bool(job.joined),
        on_cpu=on_cpu, in_processes=in_processes, weights=weights,
        spawns=job.processes if spawned and not command else 0, project=str(copy.folder),
        gpus=job.processes if spawned else 1,
    )  # fmt: skip
    variables = {k: v for k, v in first.variables.items() if not k.startswith(_OF_MPI)}
    variables |= {} if in_processes else _WITHOUT_GPUS
    variables |= {} if spawned else _ONE_RANK
    variables = {**KEEPS_FREED_MEMORY, **variables}

    def run(asked: JobSettings) -> running.Ran:
        return running.run_kept(
            copy.words(words), settings.write(asked, folder), folder=place,
            variables={} if command else variables,
            without=(_OF_MPI, "PMIX_", *_OF_AGENT), deadline_s=deadline_s,
        )  # fmt: skip

    ran = run(asked)
    if on_cpu and not ran.hung and not (folder / "replayed.json").exists():
        # There are scripts that leave, or raise, where they see fewer GPUs than they are to use.
        ran = run(msgspec.structs.replace(asked, gpus=job.processes))
    if ran.hung:
        raise NoReferenceError(
            f"the script made no progress for {deadline_s:g} s in a single process"
        )
    return _read(folder, ran, replaced)


def _is_spawned(words: Sequence[str]) -> bool:
    return any(word.startswith("from multiprocessing.") for word in words)


def _of_launcher(job: JobRecording) -> Sequence[str]:
    """The command of the process that has started rank 0, or that of the one before it."""
    process = job.ranks[0].parent
    for _ in range(_MOST_PARENTS):
        note = job.folder / f"python-{process}"
        said = note.read_text(errors="surrogateescape").split("\0") if note.exists() else []
        if len(said) < 2:
            break
        if not _is_spawned(said[1:]):
            return said[1:]
        process = int(said[0]) if said[0].isdecimal() else 0
    raise NoReferenceError(
        "the script starts its ranks itself, and its own command is not known; pass the command "
        "that trains in a single process, --reference COMMAND"
    )


def of_one(words: Sequence[str], *sizes: int) -> tuple[list[str], tuple[str, ...]]:
    """A command of which options that say how many ranks, machines or GPUs there are say one: their
    number is one of `sizes`; and what was replaced, for the report.
    """
    found, replaced = list(words), []
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not _COUNTS.fullmatch(name):
            continue
        at = place if equals else place + 1
        given = value if equals else next(iter(words[at : at + 1]), "")
        if given.isdecimal() and int(given) > 1 and (int(given) in sizes or "node" in name):
            found[at] = f"{name}=1" if equals else "1"
            replaced.append(f"{name} {given}")
    return found, tuple(replaced)


def _read(folder: Path, ran: running.Ran, replaced: tuple[str, ...]) -> Reference:
    if (folder / "defect").exists():
        said = (folder / "defect").read_text(errors="backslashreplace").strip().rpartition("\n")[2]
        raise NoReferenceError(f"the reference run failed: {said[:300]}")
    file = folder / "replayed.json"
    if not file.exists():
        if not ran.raised:
            why = f"ends with exit code {ran.code}"
        else:
            why = f"raises {ran.raised[0][1][:300]}"
        raise NoReferenceError(
            f"the script {why} before its first step in a single process; pass the command that "
            "trains in a single process, --reference COMMAND"
        )
    replayed = read_own(file, Replayed)
    if not replayed.steps:
        failure = replayed.failure or "the script makes no step in a single process"
        raise NoReferenceError(failure, joins=replayed.joins)
    return Reference(folder, replayed, replaced)
