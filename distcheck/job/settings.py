"""What the processes of a job are asked for; a file that an environment variable names."""

from pathlib import Path
from typing import Literal

import msgspec

from distcheck import private
from distcheck.errors import UsageError
from distcheck.records import Collective

VARIABLE = "DISTCHECK_JOB"
FILE = "settings.json"
MOST_STEPS = 10_000
Mode = Literal["record", "replay", "guard"]
TOGETHER, IN_TURN, BY_RANK = "together", "in turn", "rank by rank"  # modes of a replay


class ReplayedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay reached at one step: learning rates, losses, and the optimizer's settings, and
    how many `draws` its tolerances are measured by;
    `folded` is what its passes' losses are, where they were made once more as one batch: a mean, a
    sum, or several terms; `changes`: whether the script changed gradients after the last backward
    pass; `clips`: the most that clipping allowed, and the norm that it found.
    """

    step: int
    groups: tuple[dict[str, float], ...]
    losses: tuple[float, ...]
    draws: int
    skipped: bool = False
    folded: Literal["", "mean", "sum", "terms"] = ""
    changes: bool = False
    clips: tuple[tuple[float, float], ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says when it is asked where it is."""

    rank: int
    world: int
    step: int
    stack: str
    collectives: tuple[Collective, ...]


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """What one process read of a rank's samples: each part of them is the `same` as the rank had,
    or `other`, `random` where it is made by chance, `constant` where all samples have it; and how
    large parts are.
    """

    rank: int
    parts: tuple[str, ...]
    sizes: tuple[int, ...]


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """How a replay went: by which batches, `pads` if they were padded, at which steps, or why it
    could not go on; and why the passes of an accumulation could not be made as one. A right job has
    the gradients of one process times one of `scales`; those of the replay are times `scale`.
    `interacts`: one batch of all samples has another gradient than the mean of the ranks' batches.
    `joins`: it may go on with the micro-batches of a step as one forward pass.
    """

    mode: str
    why: str
    steps: tuple[ReplayedStep, ...] = ()
    failure: str = ""
    unfolded: str = ""
    scales: tuple[float, ...] = (1.0,)
    scale: float = 1.0
    pads: bool = False
    interacts: bool = False
    joins: bool = False
    reads: tuple[Read, ...] = ()


class ReplayTask(msgspec.Struct, frozen=True):
    """What a copy of a replay is: `rank` whose batches it gets, or -1 for those of all ranks
    together; `step` whose gradients it computes, or -1 for every step; `draw` seeds the
    perturbation of its parameters, 0 for none. With `pairs` it makes one pass, with the samples of
    those (rank, forward pass) in one batch; with `longer` its batches are padded by more than they
    need; if `doubles`, collectives before its backward pass return twice their results.
    """

    rank: int
    step: int = 0
    draw: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    longer: bool = False
    doubles: bool = False


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a job is to be recorded.

    steps, from_step  optimizer steps to record, and how many come before them
    budget            bytes of whole tensors, of all ranks and steps together
    keep_going        whether the job goes on after the last recorded step
    kept              whether the recording is compared with another job's: then the optimizer's
                      state and averages of the model are noted as well
    modules           whether the modules within a model are watched
    ops               whether the operators that torch runs are heard
    draw              seeds the moves of every parameter by one ULP; 0 for none
    recording         in a replay: the folder of the recording
    joins             in a replay: whether the micro-batches of a step are one forward pass
    spawns            in a replay: how many ranks the script starts itself; 0 where it does not
    project           in a replay: the copy of the project
    in_processes      in a replay: whether copies are processes of their own, and no forks
    task, task_mode   in such a process: what it is, in which mode of the replay
    weights           in a replay: what each rank counts for: samples, targets, equal, or as is seen
    mesh              the axes of the ranks' mesh, as a person gives them: data=2,tensor=2
    on_cpu            whether a script that asks for a GPU gets the CPU
    gpus              in a replay: how many GPUs are said to be there then; 0: as many as ranks
    every, warns      of a guard: how often it checks, and whether a job goes on when ranks differ
    bundles           of a guard: the folder for what it finds
    randomness        of a guard: whether ranks must draw different random numbers
    audit             of a guard: whether what an optimizer gets is compared with what backward gave
    """

    mode: Mode = "record"
    steps: int = 8
    from_step: int = 0
    budget: int = 4 << 30
    keep_going: bool = False
    kept: bool = False
    modules: bool = False
    ops: bool = False
    draw: int = 0
    recording: str = ""
    joins: bool = False
    in_processes: bool = False
    spawns: int = 0
    project: str = ""
    task: ReplayTask | None = None
    task_mode: str = ""
    weights: str = ""
    mesh: str = ""
    on_cpu: bool = False
    gpus: int = 0
    every: int = 100
    warns: bool = False
    bundles: str = ""
    randomness: bool = True
    audit: bool = False

    @property
    def most(self) -> int:
        """The last step that may be recorded: ranks that have exchanged nothing so far may average
        their parameters later (local SGD), which is waited for, as many steps as four times those
        that were asked for.
        """
        return self.from_step + 4 * self.steps - 1


def write(settings: JobSettings, folder: Path) -> Path:
    """Writes the settings into the folder of a recording, and returns the file."""
    file = folder / FILE
    private.write(file, msgspec.json.encode(settings))
    return file


def read(file: Path) -> JobSettings:
    return msgspec.json.decode(file.read_bytes(), type=JobSettings)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def bytes_of(text: str) -> int:
    """`4GB` as a number. Raises UsageError for what is not a size."""
    number = text.strip().upper().rstrip("KMGTB")
    unit = text.strip().upper()[len(number) :]
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        size = 0.0
    if not 0 < size < float("inf"):
        raise UsageError(f"--budget {text} is not a size; give a number and KB, MB, GB or TB: 4GB")
    return int(size)
