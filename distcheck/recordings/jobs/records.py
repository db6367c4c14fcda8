"""What one rank writes of one optimizer step: a record in JSON, and its tensors beside it.

    rank-0002/rank.json                who this is, and how its script was started
    rank-0002/read.json                the last thing: some samples, read once more
    rank-0002/step-000003.json         a StepRecord
    rank-0002/step-000003.safetensors  its tensors; the record holds their checksum

Tensors are called by what they are: `before/<parameter>` and `buffer/` (all of them, before the
first forward pass that the step was trained on; `start/` before the first one, where they have
changed in between; a parameter that is as the step before has left it is in that one's file), and
of the parameters that the optimizer has: `written/` (a digest alone, where one is another when the
optimizer begins to step), `after/`, `local/` (before the exchange, added up over the backward
passes that are in `.grad`), `sizes/` (the absolute values of those, added up, where a pass before
the last may exchange), `raw/` (at the end of the exchange), `step/` (what the optimizer sees);
`optim/<parameter>/<key>` is what the optimizer holds when it begins to step, in a recording that
another job's is compared with (a digest alone, unless small). `data/<digest>` are batches, inputs
and targets; `random/<pass>` and `origin/<pass>` random streams before a forward pass, and when its
batch was handed out. Beyond the budget `local/`, `raw/` and `step/` are 64 sums (`sketches`), with
`magnitude/<name>` for `local/`. Of a tensor that is divided among ranks each writes its own part.
"""

import math
import stat
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import xxhash

from distcheck import private
from distcheck.errors import UsageError
from distcheck.errors.masking import masked_words
from distcheck.recordings.jobs.watched import WatchedCalls
from distcheck.records.decoding import World, decode_json, read_bounded

MOST_OPS = 20_000  # of one step
COMPILED = "torch.compile"


class OpCall(msgspec.Struct, frozen=True):
    """A call of an operator, or of a region that torch.compile has compiled: within which `module`,
    in which `part` of a step. `outputs` is empty where it is over later, as a collective is;
    `draws`: whether it draws random numbers.
    """

    name: str
    inputs: str
    outputs: str
    module: str = ""
    part: str = "forward"
    draws: bool = False


class Ops(msgspec.Struct, frozen=True):
    """Those of a step in their order, and how many are not there since they were too many."""

    calls: tuple[OpCall, ...] = ()
    left_out: int = 0


Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
MOST_ROWS = 1 << 16  # digests of samples in one batch
LINES = ("backward", "clip", "step", "loader")
MOST_LINES = 4  # of each of these in one step
MOST_CALLS = 256  # collectives of one step
Read = TypeVar("Read", bound=msgspec.Struct)


class LoadedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What a data loader handed out: the leaves that are tensors, by digest, and its rows.

    indices  what the sampler gave for it, where the data set has indices
    files    digests of the names of the files that its samples are from, where it has these
    drawn    digests of the random streams that making it has drawn from, as they were before
    """

    loader: int
    epoch: int
    number: int
    leaves: tuple[str, ...]
    rows: tuple[str, ...]
    indices: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    drawn: dict[str, str] = {}


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank reads for an index, with random streams that are alike on all ranks: a digest of
    each part, the largest first.
    """

    loader: int
    index: int
    parts: tuple[str, ...]


class RereadSamples(msgspec.Struct, frozen=True):
    """Those that a rank has read once more, after its last step."""

    samples: tuple[Sample, ...]


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over a data loader, when it began: `sampler_epoch` is what set_epoch has set."""

    loader: int
    epoch: int
    length: int
    sampler: str
    shuffles: bool
    sampler_epoch: int | None = None


class LossCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of one of torch's losses: `counted` targets, its value, the digest of its target."""

    name: str
    reduction: str
    counted: int
    value: float
    target: str


class Factor(msgspec.Struct, frozen=True, kw_only=True):
    """A number that a term of a loss was multiplied by. `computed`: the script may have put another
    factor into it, as of `aux * (0.1 / passes)`; `outer`: the whole loss was multiplied by it;
    `divides`: the script divided by one over it.
    """

    number: float
    computed: bool
    outer: bool
    divides: bool = False


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One of the losses that a loss adds up: the number of its LossCall in the pass, -1 for a mean
    or sum of the script's own, and what it was multiplied by.
    """

    name: str
    reduction: str
    call: int
    factors: tuple[Factor, ...] = ()

    @property
    def weight(self) -> float:
        return math.prod(factor.number for factor in self.factors)


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass of the model, and the backward that followed.

    inputs       digests of the tensors among its arguments
    rows         digests of the samples in the first of them
    batches      the batches that were handed out for it: loader, pass over it, number
    live         whether the optimizer was given gradients that went through it
    later        whether parameters are those of `before/`, and not yet those of `start/`
    loss         what backward started from; None where none followed
    pieces       of each input that ranks of one model have pieces of: their digests, rank by rank
    exchanges    whether DistributedDataParallel was to exchange in it; None without one
    exchange_s   seconds that an exchange made backward wait until then, on average, by torch's
                 own measurement; None where it has none
    random       digests of the random streams before; `draws`: whether the forward pass drew;
                 `drew`: whether the script drew between the batch and backward, outside of it
    terms        what the loss adds up; without them, `unread` says why
    """

    inputs: tuple[str, ...]
    rows: tuple[str, ...]
    random: dict[str, str]
    batches: tuple[tuple[int, int, int], ...] = ()
    live: bool = True
    later: bool = False
    draws: bool = False
    drew: bool = False
    loss: float | None = None
    losses: tuple[LossCall, ...] = ()
    terms: tuple[Term, ...] = ()
    unread: str = ""
    pieces: tuple[tuple[str, ...], ...] = ()
    exchanges: bool | None = None
    exchange_s: float | None = None
    autocast: str = ""


class Clip(msgspec.Struct, frozen=True, kw_only=True):
    """A call of torch's clipping: the most it allows (None: it only finds the norm), the norm that
    it found, how many forward passes of the step came before it, whether a GradScaler's scale was
    in the gradients, and of which parameters; of all without `names`.
    """

    kind: str
    most: float | None
    norm: float | None = None
    passes: int = 0
    scaled: bool = False
    names: tuple[str, ...] = ()


class CollectiveCall(msgspec.Struct, frozen=True):
    """A collective that Python code called, and where: file:line of the script; how many numbers it
    was given, and whether a backward pass of the step came before it.
    """

    name: str
    place: str
    elements: int = 0
    after_backward: bool = False


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank holds of a tensor that is divided among ranks (a DTensor): the tensor's shape,
    and where in it this part begins. The ranks `of` it have the whole together; those in `adds`
    hold terms of one sum, or of a mean.
    """

    shape: tuple[int, ...]
    at: tuple[int, ...]
    of: tuple[int, ...]
    adds: tuple[int, ...] = ()
    mean: bool = False


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One axis of the mesh of a job's ranks, and what it is for; ranks are counted along the last
    one first.
    """

    name: str
    kind: Literal["data", "tensor", "sequence", "pipeline", "expert"]
    size: int


# Kinds of axes along which ranks train one model on the same samples; along others each has its
# own, as experts are computed for the samples of all.
SHARING = ("tensor", "sequence", "pipeline")


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step of one rank; `digests` are those of all tensors, kept or not.

    passes     forward passes since the step before, of any optimizer
    earlier    passes of records before this one that it was trained on: (step, number)
    backwards  how many backward passes came before the step
    carried    whether gradients of the optimizer's step before are still in what it was given
    exchanged  whether `raw/` was taken when DistributedDataParallel had exchanged, and not when
               the script first used the gradients
    lines        where the script calls what is heard: FILE:LINE, by what it is (`LINES`); empty
                 for one that is a package's
    averages     at the first and last step: digests of models that look like one that trains
    held         the same before the first forward pass, of dictionaries of tensors as well, in a
                 recording that another job's is compared with
    computed     the dtype of autocast, if there was one, in a forward pass or around it
    counters     the numbers that the optimizer counts its steps by, when it begins to step
    not_finite   what had infinities or NaN in a step that was not skipped: inputs, loss, gradients
    parts        what this rank has of tensors that are divided among ranks, by their names
    modules      what the modules were given and returned, where they were watched
    ops          the operators that ran, where they were heard
    gpu_bytes    the most memory that torch had taken on the rank's GPU until then
    """

    step: int
    rank: int
    world: World
    optimizer: str
    number: int = 0  # of the optimizer
    groups: tuple[dict[str, float], ...]
    passes: tuple[Pass, ...]
    earlier: tuple[tuple[int, int], ...] = ()
    backwards: int = 1
    carried: bool = False
    exchanged: bool = False
    batches: tuple[LoadedBatch, ...] = ()
    iterations: tuple[Iteration, ...] = ()
    clips: tuple[Clip, ...] = ()
    calls: tuple[CollectiveCall, ...] = ()
    digests: dict[str, Digest] = {}
    dtypes: dict[str, str] = {}
    not_finite: tuple[str, ...] = ()
    lines: dict[str, tuple[str, ...]] = {}
    scale: float | None = None
    skipped: bool = False
    whole: bool = True
    batchnorm: bool = False
    averages: dict[str, str] = {}
    held: tuple[str, ...] = ()
    computed: str = ""
    counters: dict[str, float] = {}
    parts: dict[str, Shard] = {}
    modules: WatchedCalls | None = None
    ops: Ops | None = None
    gpu_bytes: int = 0
    checksum: str = ""

    @property
    def trained(self) -> list[Pass]:
        """The passes that the step was trained on, each with its loss."""
        return [one for one in self.passes if one.live and one.loss is not None]


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who a rank is: how its script was started, where, and what it had trained with."""

    rank: int
    world: World
    arguments: tuple[str, ...]
    folder: str
    backend: str
    device: str
    torch: str
    variables: dict[str, str] = {}
    process: int = 0
    parent: int = 0  # the process that has started it
    wrapper: str = ""
    divided_by: str = ""
    axes: tuple[Axis, ...] = ()  # of the mesh, where the script has one
    schedules_by: str = ""  # accelerate, where its schedules step once per rank


class KeptRecording(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording that is kept must hold; `form` numbers how it is written."""

    world: World
    steps: tuple[int, ...]
    form: int = 0


def digest(data: bytes | memoryview) -> str:
    """32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_of(file: Path, most: int | None = None) -> str:
    """The digest of a file that is not empty. It is mapped, as copies of large ones cost more than
    all else that is done with them. Raises OSError, and ValueError for one of more than `most`
    bytes or that is not a file.
    """
    about = file.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is not a file")
    if most is not None and about.st_size > most:
        raise ValueError(f"it is larger than {most >> 20} MiB")
    with open(file, "rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
        return xxhash.xxh3_128_hexdigest(data)


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:04d}"


def write_json(file: Path, record: msgspec.Struct) -> None:
    """Writes a record at once: a reader sees all of it, or nothing."""
    private.write(file, msgspec.json.encode(record))


def read_step(file: Path) -> StepRecord:
    """A record again. Raises UsageError for one that is damaged."""
    return read_own(file, StepRecord)


def read_rank(file: Path) -> RankRecord:
    """A rank's record again. Raises UsageError for one that is damaged."""
    return read_own(file, RankRecord)


def for_others(record: RankRecord) -> RankRecord:
    """The record for others, or to be kept: the words of its command may hold secrets."""
    return msgspec.structs.replace(record, arguments=tuple(masked_words(record.arguments)))


def read_samples(file: Path) -> tuple[Sample, ...]:
    """What a rank has read once more, if it has. Raises UsageError for a file that is damaged."""
    return read_own(file, RereadSamples).samples if file.exists() else ()


def read_manifest(file: Path) -> KeptRecording:
    """What a kept recording must hold. Raises UsageError for a file that is damaged."""
    return read_own(file, KeptRecording)


def read_own(file: Path, kind: type[Read]) -> Read:
    """A file of a recording. Raises UsageError for one that is damaged."""
    try:
        return decode_json(read_bounded(file), kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{file} is damaged: {error}; run distcheck job again") from error
