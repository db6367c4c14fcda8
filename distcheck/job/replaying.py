"""Starts the reference: rank 0's script as a single process, in a copy of the project."""

import dataclasses
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from distcheck.job import running, settings
from distcheck.job.copying import ProjectCopy
from distcheck.job.settings import JobSettings, ReplayedStep, ReplayResult, Retry
from distcheck.machine.resources import KEEPS_FREED_MEMORY
from distcheck.recordings.jobs.reading import JobRecording, TensorCache, read_tensors
from distcheck.recordings.jobs.records import read_record

_MOST_PARENTS = 8
# Options with numbers of ranks, machines or GPUs.
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
# Autograd has a thread for each visible GPU, and a fork loses it.
_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
_OF_MPI = "OMPI_"
# Of torchrun's agent, which has exited; scripts read the others, such as is_torchelastic_launched.
_OF_AGENT = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")


class NoReferenceError(Exception):
    """Raised with the reason why the reference cannot run, as text for the report. `retry` names
    another way to run it, if there is one.
    """

    def __init__(self, why: str, retry: Retry = "") -> None:
        super().__init__(why)
        self.retry = retry


@dataclass(frozen=True)
class Reference:
    """Results of the single-process run, including its tensors."""

    folder: Path
    replayed: ReplayResult
    _kept: TensorCache = field(default_factory=TensorCache)

    def until(self, steps: tuple[ReplayedStep, ...]) -> "Reference":
        fewer = msgspec.structs.replace(self.replayed, steps=steps)
        return dataclasses.replace(self, replayed=fewer)

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Return the results of one step. Raises UsageError if the file is damaged."""
        file = self.folder / f"replay-{step:06d}.safetensors"
        return self._kept.get(step, lambda: read_tensors(file))


def replay(
    job: JobRecording, copy: ProjectCopy, folder: Path, *, on_cpu: bool = False, weights: str = "",
    command: str = "", deadline_s: float = 300.0, modules: bool = False, own_inputs: str = "",
) -> Reference:  # fmt: skip
    """Run rank 0's script, or `command`, as a single process. If `own_inputs` is set, the script
    keeps its own inputs; it is the reason why it cannot have those of the ranks. Raises
    NoReferenceError.
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
            f"ranks run in {there}, which is not in the copied folder {copy.project}; start the "
            "job there"
        )
    is_forked = first.process and not (job.folder / f"python-{first.process}").exists()
    spawned = bool(is_forked) or _is_spawned(first.arguments)
    words = shlex.split(command) or list(_command_of_launcher(job) if spawned else first.arguments)
    sizes = {job.processes, *(axis.size for axis in first.axes)}
    words, replaced = (words, ()) if command else with_one_rank(words, *sizes)
    in_processes = first.device != "cpu"  # a fork loses the GPU's state
    asked = JobSettings(
        mode="replay", steps=len(job.steps), recording=str(job.folder), modules=modules,
        joins=bool(job.joined), own_inputs=bool(own_inputs),
        on_cpu=on_cpu, in_processes=in_processes, weights=weights,
        spawns=job.processes if spawned and not command else 0, project=str(copy.folder),
        gpus=job.processes if spawned else 1,
    )  # fmt: skip
    variables = {k: v for k, v in first.variables.items() if not k.startswith(_OF_MPI)}
    variables |= {} if in_processes else _WITHOUT_GPUS
    variables |= {} if spawned else _ONE_RANK
    variables = {**KEEPS_FREED_MEMORY, **variables}

    def run(asked: JobSettings) -> running.CommandResult:
        return running.run_silently(
            copy.words(words), settings.write(asked, folder), folder=place,
            variables={} if command else variables,
            without=(_OF_MPI, "PMIX_", *_OF_AGENT), deadline_s=deadline_s,
        )  # fmt: skip

    ran = run(asked)
    if on_cpu and not ran.hung and not (folder / "replayed.json").exists():
        # Some scripts exit or raise if they see fewer GPUs than they need.
        ran = run(msgspec.structs.replace(asked, gpus=job.processes))
    if ran.hung:
        raise NoReferenceError(
            f"the script made no progress for {deadline_s:g} s in a single process"
        )
    replayed = _read(folder, ran)
    return Reference(
        folder, msgspec.structs.replace(replayed, replaced=replaced, own_inputs=own_inputs)
    )


def _is_spawned(words: Sequence[str]) -> bool:
    return any(word.startswith("from multiprocessing.") for word in words)


def _command_of_launcher(job: JobRecording) -> Sequence[str]:
    """Return the command of the process that started rank 0, or of one of its ancestors."""
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


def with_one_rank(words: Sequence[str], *sizes: int) -> tuple[list[str], tuple[str, ...]]:
    """Replace the numbers of ranks, machines or GPUs in a command's options, if they are in
    `sizes`, by 1. Return the command and the replaced options.
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


def _read(folder: Path, ran: running.CommandResult) -> ReplayResult:
    if (folder / "defect").exists():
        said = (folder / "defect").read_text(errors="backslashreplace").strip().rpartition("\n")[2]
        raise NoReferenceError(f"the reference run failed: {said[:300]}")
    file = folder / "replayed.json"
    if not file.exists():
        if not ran.raised:
            why = f"exits with code {ran.code}"
        else:
            why = f"raises {ran.raised[0].text[:300]}"
        raise NoReferenceError(
            f"the script {why} before its first step in a single process; pass the command that "
            "trains in a single process, --reference COMMAND"
        )
    replayed = read_record(file, ReplayResult)
    if not replayed.steps:
        failure = replayed.failure or "the script makes no step in a single process"
        raise NoReferenceError(failure, replayed.retry)
    if ran.raised and not replayed.failure:
        why = f"the script, given the inputs of the ranks, raises {ran.raised[0].text[:300]}"
        replayed = msgspec.structs.replace(replayed, failure=why)
    return replayed
