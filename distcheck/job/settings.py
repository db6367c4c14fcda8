"""Settings of a job's processes, in a file that an environment variable names; and the replies of
the processes.
"""

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
Retry = Literal["", "joined", "own inputs"]
# Before the gradient of a term of the loss, in the file of a replayed step; the terms' sources as
# JSON; and their growth if every sample occurs twice.
TERM, TERMS, GROWTH = "term/", "term-sources", "term-growth"
TOGETHER, IN_TURN, BY_RANK = "together", "in turn", "rank by rank"  # modes of a replay


class ReplayedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a replay at one step: optimizer settings, losses, and the number of perturbed runs
    (`draws`) that measure tolerances.

    If the passes of the step were merged into one batch, `folded` is the kind of the loss: a mean,
    a sum, or several terms. `changes` is True if the script changed gradients after the last
    backward pass. `clips` are the maximum norm of each clipping call, and the norm that the call
    computed.
    """

    step: int
    groups: tuple[dict[str, float], ...]
    losses: tuple[float, ...]
    draws: int
    skipped: bool = False
    folded: Literal["", "mean", "sum", "terms"] = ""
    changes: bool = False
    clips: tuple[tuple[float, float], ...] = ()


class RankPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of a rank that was asked for its position."""

    rank: int
    world: int
    step: int
    stack: str
    collectives: tuple[Collective, ...]


class SampleComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of a rank's samples with the same samples read by a single process. Each field is
    the `same`, `other`, `random`, or `constant` over all samples. Also holds the sizes of the
    fields.
    """

    rank: int
    parts: tuple[str, ...]
    sizes: tuple[int, ...]


class ReferenceChoice(msgspec.Struct, frozen=True):
    """How the ranks' batches are fed to the script, or `failure`: the reason why they cannot be.

    A correct job has the gradients of the reference times one of `scales`, because a loss that is a
    sum over samples is often multiplied by the world size. `interacts` is True if the gradient of
    the joint batch differs from the mean over the ranks' batches. `retry` names another way to run:
    with the micro-batches of a step as one forward pass; or with the script's own inputs, because
    it raised when it was given those of the ranks.
    """

    mode: str = ""
    why: str = ""
    failure: str = ""
    scales: tuple[float, ...] = (1.0,)
    retry: Retry = ""
    interacts: bool = False


class ReplayResult(ReferenceChoice, frozen=True, kw_only=True):
    """Result of a replay: its steps, and the reason if passes could not be merged (`unfolded`).

    Its gradients are multiplied by `scale`. `pads` is True if batches were padded. `divides` is
    True if the inputs of a rank are parts of the samples that it reads. The front end sets two
    fields: `replaced` are the options of the command that were set to 1, and `own_inputs` is the
    reason why the script kept its own inputs.
    """

    steps: tuple[ReplayedStep, ...] = ()
    unfolded: str = ""
    scale: float = 1.0
    pads: bool = False
    divides: bool = False
    reads: tuple[SampleComparison, ...] = ()
    replaced: tuple[str, ...] = ()
    own_inputs: str = ""


class ReplayTask(msgspec.Struct, frozen=True):
    """Role of a copy of the replay.

    `rank` is the rank whose batches the copy receives, or -1 for all ranks together. `step` is the
    step whose gradients it computes, or -1 for every step. `draw` is the seed of its perturbation;
    0 means none. With `pairs`, it runs one pass whose batch contains the samples of these (rank,
    forward pass) pairs. With `longer`, its batches have more padding than necessary. With
    `doubles`, collectives before backward double their results.
    """

    rank: int
    step: int = 0
    draw: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    longer: bool = False
    doubles: bool = False


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the processes of a job.

    steps, from_step  optimizer steps to record, and the number of steps before them
    budget            bytes of whole tensors, of all ranks and steps together
    keep_going        if True, the job continues after the last recorded step
    kept              if True, optimizer state and averages of the model are recorded as well,
                      to compare the recording with another job's
    modules           if True, the modules within a model are recorded
    ops               if True, the operators that torch runs are recorded
    draw              seed of the perturbation of every parameter by one ULP; 0 for none
    recording         in a replay: the folder of the recording
    joins             in a replay: if True, the micro-batches of a step are one forward pass
    own_inputs        in a replay: if True, models and losses keep the script's own inputs
    spawns            in a replay: number of ranks that the script starts itself, or 0
    project           in a replay: the copy of the project
    in_processes      in a replay: if True, copies are separate processes, not forks
    task, task_mode   in such a process: its role, and the mode of the replay
    weights           in a replay: the weights of ranks: samples, targets, equal, or as measured
    mesh              the axes of the ranks' mesh, as given by the user: data=2,tensor=2
    on_cpu            if True, a script that asks for a GPU receives the CPU
    gpus              in a replay: number of GPUs to report then; 0: as many as ranks
    every, warns      guard: steps between checks; if `warns`, the job continues on a difference
    bundles           guard: the folder for findings
    randomness        guard: if True, ranks must draw different random numbers
    audit             guard: if True, optimizer gradients are compared with local gradients
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
    own_inputs: bool = False
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
        """The last step that may be recorded: 4x the requested number. Ranks that have not
        communicated so far may average their parameters later (local SGD).
        """
        return self.from_step + 4 * self.steps - 1


def write(settings: JobSettings, folder: Path) -> Path:
    file = folder / FILE
    plain = msgspec.convert(settings, JobSettings, from_attributes=True)  # no options of a command
    private.write(file, msgspec.json.encode(plain))
    return file


def read(file: Path) -> JobSettings:
    return msgspec.json.decode(file.read_bytes(), type=JobSettings)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str) -> int:
    """Convert a size such as `4GB` to bytes. Raises UsageError for other text."""
    number = text.strip().upper().rstrip("KMGTB")
    unit = text.strip().upper()[len(number) :]
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        size = 0.0
    if not 0 < size < float("inf"):
        raise UsageError(f"--budget {text} is not a size; pass a number and KB, MB, GB or TB: 4GB")
    return int(size)
