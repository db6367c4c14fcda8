"""Format of one rank's recording of an optimizer step: a record in JSON, and its tensors next to
it.

    rank-0002/rank.json                identity of the rank, and how its script was started
    rank-0002/read.json                written at the end: some samples, read a second time
    rank-0002/step-000003.json         a StepRecord
    rank-0002/step-000003.safetensors  its tensors; the record holds their checksum

The name of a tensor starts with its kind:

    before/<parameter>, buffer/   before the first forward pass that the step was trained on; a
                   parameter unchanged since the previous step is in the file of that step
    start/         before the first forward pass of all, if different from `before/`
    written/       only a digest, if the parameter changed before the optimizer step
    after/         after the optimizer step
    local/         local gradients, summed over the backward passes in `.grad`
    sizes/         their summed absolute values, if a pass before the last may synchronize
    cleared/, cleared-sizes/   the same for contributions that were cleared before the step
    raw/           reduced gradients
    step/          optimizer gradients
    optim/<parameter>/<key>   optimizer state before the step, in a recording to be compared with
                   another job's (only a digest, unless small)
    data/<digest>  batches, inputs and targets
    random/<pass>  RNG states before a forward pass; origin/<pass>: when its batch was loaded
    random/step    RNG states after backward, if random numbers are drawn before the optimizer step

Beyond the budget, `local/`, `raw/` and `step/` are 64 projections (`sketches`), with
`magnitude/<name>` for `local/`. Each rank writes its shard of a sharded tensor.
"""

import math
import stat
from collections.abc import Collection
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import xxhash

from distcheck import private
from distcheck.errors import UsageError
from distcheck.errors.masking import masked_words
from distcheck.recordings.jobs.watched import WatchedCalls
from distcheck.records.decoding import World, decode_json, read_bounded
from distcheck.records.ledger import Ledger

MOST_OPS = 20_000  # of one step
BEFORE_NOISE = "random/step"
COMPILED = "torch.compile"


class OpCall(msgspec.Struct, frozen=True):
    """A call of an operator or a compiled region, in a `module` and a `part` of a step. `outputs`
    is "" if it completes later, like a collective. `draws` is True if it uses random numbers.
    `line` is the script's, FILE:LINE; "" in a package.
    """

    name: str
    inputs: str
    outputs: str
    module: str = ""
    part: str = "forward"
    draws: bool = False
    line: str = ""


class RecordedOps(msgspec.Struct, frozen=True):
    """The operators of a step in order, and the number omitted beyond the limit."""

    calls: tuple[OpCall, ...] = ()
    left_out: int = 0


Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
MOST_ROWS = 1 << 16  # digests of samples in one batch
LINES = ("backward", "clip", "step", "loader")
MOST_LINES = 4  # of each of these in one step
MOST_CALLS = 256  # collectives of one step
Read = TypeVar("Read", bound=msgspec.Struct)


class LoadedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of a data loader: its tensors by digest, and its rows.

    indices  the sampler's indices, if the data set has indices
    files    digests of the names of the samples' files, if known
    drawn    digests of the RNG states when the loader began to make the batch
    """

    loader: int
    epoch: int
    number: int
    leaves: tuple[str, ...]
    rows: tuple[str, ...]
    indices: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    drawn: dict[str, str] = {}


class RereadSample(msgspec.Struct, frozen=True, kw_only=True):
    """The sample that a rank reads for an index, under RNG streams that are equal on all ranks: a
    digest of each leaf, the largest leaf first.
    """

    loader: int
    index: int
    parts: tuple[str, ...]


class RereadSamples(msgspec.Struct, frozen=True):
    """The samples that a rank reads a second time after its last step."""

    samples: tuple[RereadSample, ...]


class LoaderIteration(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a pass over a data loader; `sampler_epoch` is the value from set_epoch.

    samples        the size of the data set, if known
    batch_sampler  the class of a batch sampler that is not torch's
    settings       the sampler's `seed`, `rank` and `num_replicas`, if it has them
    """

    loader: int
    epoch: int
    length: int
    sampler: str
    shuffles: bool
    sampler_epoch: int | None = None
    samples: int = -1
    batch_sampler: str = ""
    settings: dict[str, int] = {}


class LossCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a torch loss: number of targets (`counted`), value, digest of its target."""

    name: str
    reduction: str
    counted: int
    value: float
    target: str


class LossFactor(msgspec.Struct, frozen=True, kw_only=True):
    """A factor of a loss term.

    computed  True if the script may have included a second factor, as in `aux * (0.1 / passes)`
    outer     True if it applies to the whole loss
    divides   True if the script divided by its inverse
    """

    number: float
    computed: bool
    outer: bool
    divides: bool = False


class LossTerm(msgspec.Struct, frozen=True, kw_only=True):
    """A summand of a loss: its factors and its LossCall (-1: a mean or sum of the script)."""

    name: str
    reduction: str
    call: int
    factors: tuple[LossFactor, ...] = ()

    @property
    def weight(self) -> float:
        return math.prod(factor.number for factor in self.factors)


class ForwardPass(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass of the model, and the backward that followed.

    inputs       digests of the tensors among its arguments
    rows         digests of the samples in the first of these tensors
    batches      the batches loaded for it: loader, pass over the loader, number
    live         True if the optimizer gradients include gradients of this pass
    later        True if parameters are those of `before/`, no longer of `start/`
    loss         initial loss of backward; None if no backward followed
    pieces       digests, rank by rank, of each input that is sharded within a model
    exchanges    True if DistributedDataParallel was to synchronize in this pass; None without it
    exchange_s   mean seconds by which synchronization delayed backward so far, as measured by
                 torch; None if unknown
    random       digests of the RNG states before it
    draws        True if forward used random numbers
    drew         True if the script used some between batch and backward, outside forward
    terms        summands of the loss; without them, `unread` is the reason
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
    terms: tuple[LossTerm, ...] = ()
    unread: str = ""
    pieces: tuple[tuple[str, ...], ...] = ()
    exchanges: bool | None = None
    exchange_s: float | None = None
    autocast: str = ""


class ClipCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of torch's gradient clipping.

    most    maximum norm; None: torch only computed the norm
    norm    the norm before clipping
    passes  number of preceding forward passes of the step
    scaled  True if gradients contained a GradScaler's scale
    names   parameters; empty: all
    """

    kind: str
    most: float | None
    norm: float | None = None
    passes: int = 0
    scaled: bool = False
    names: tuple[str, ...] = ()


class CollectiveCall(msgspec.Struct, frozen=True):
    """A collective called from Python at a place (file:line of the script), with its number of
    elements. `after_backward` is True if a backward pass of the step came before it.
    """

    name: str
    place: str
    elements: int = 0
    after_backward: bool = False


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's shard of a DTensor: the tensor's shape, and the shard's offset `at`. Ranks in `of`
    hold the whole tensor together; ranks in `adds` hold summands of one sum, or of a mean.
    """

    shape: tuple[int, ...]
    at: tuple[int, ...]
    of: tuple[int, ...]
    adds: tuple[int, ...] = ()
    mean: bool = False


class MeshAxis(msgspec.Struct, frozen=True, kw_only=True):
    """One axis of the mesh of ranks, and its kind; the last axis varies fastest."""

    name: str
    kind: Literal["data", "tensor", "sequence", "pipeline", "expert"]
    size: int


# Kinds of axes along which ranks train one model on the same samples; along others each has its own
# samples, since experts serve the samples of all.
SHARING = ("tensor", "sequence", "pipeline")


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step of one rank; `digests` are those of all tensors, recorded or not.

    passes     forward passes since the previous step of any optimizer
    earlier    passes in earlier records that this step was trained on: (step, number)
    backwards  number of backward passes before the step
    carried    True if the optimizer gradients include those of the optimizer's previous step
    exchanged  True if `raw/` was recorded after DistributedDataParallel's synchronization, not
               when the script first used the gradients
    lines        source lines FILE:LINE of recorded calls, by kind (`LINES`); "" for a line in a
                 package
    averages     digests of models that look like a trained one, at the first and last step
    held         the same before the first forward pass, including dictionaries of tensors, in a
                 recording to be compared with another job's
    computed     the dtype of autocast in or around a forward pass, if any
    counters     the optimizer's step counters before the step
    not_finite   inputs, loss or gradients with inf or NaN in a step that was not skipped
    parts        this rank's shards of sharded tensors, by name
    modules      inputs and outputs of modules, if recorded
    ops          operators, if recorded
    ledger       the collectives of the last step, at rank 0
    gpu_bytes    the maximum memory that torch had allocated on the rank's GPU so far
    """

    step: int
    rank: int
    world: World
    optimizer: str
    number: int = 0  # of the optimizer
    groups: tuple[dict[str, float], ...]
    passes: tuple[ForwardPass, ...]
    earlier: tuple[tuple[int, int], ...] = ()
    backwards: int = 1
    carried: bool = False
    exchanged: bool = False
    batches: tuple[LoadedBatch, ...] = ()
    iterations: tuple[LoaderIteration, ...] = ()
    clips: tuple[ClipCall, ...] = ()
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
    ops: RecordedOps | None = None
    ledger: Ledger | None = None
    gpu_bytes: int = 0
    checksum: str = ""

    @property
    def trained(self) -> list[ForwardPass]:
        """Return the passes that the step was trained on; each has a loss."""
        return [one for one in self.passes if one.live and one.loss is not None]

    def by_loss(self, constant: Collection[str]) -> list[list[ForwardPass]]:
        """Return the passes with a loss, by loss: only passes of one loss accumulate.

        A pass belongs to another loss if its functions or its loaders differ, if it has other
        targets or values for the same samples, as in multi-task training, or one of the targets
        that are `constant`, as in a GAN. Passes over a whole batch have the same samples, however
        these are transformed.
        """
        sizes = {(b.loader, b.epoch, b.number): len(b.rows) or math.inf for b in self.batches}
        found: dict[Any, list[ForwardPass]] = {}
        known: dict[Any, list[Any]] = {}  # targets, by function, loaders and samples
        for one in (one for one in self.passes if one.loss is not None):
            calls = [(c.name, c.target if c.target in constant else "") for c in one.losses]
            kind = (*calls, *(place[0] for place in one.batches))
            least = max((sizes.get(place, math.inf) for place in one.batches), default=math.inf)
            samples = one.batches if len(one.rows) >= least else one.rows
            targets: list[Any] = [(c.target, c.value) for c in one.losses] or [one.loss]
            others = known.setdefault((kind, samples), [])
            others += [] if targets in others else [targets]
            found.setdefault((kind, others.index(targets)), []).append(one)
        return [*found.values()]

    @property
    def loss(self) -> float:
        """Return the sum of the losses that the step was trained on, without the loss scale."""
        return sum(one.loss or 0.0 for one in self.trained) / (self.scale or 1.0)


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a rank: how and where its script was started, and its devices and libraries.
    `settings`: versions, settings and seeds before its first step, and the digest of its script.
    """

    rank: int
    world: World
    arguments: tuple[str, ...]
    folder: str
    backend: str
    device: str
    torch: str
    variables: dict[str, str] = {}
    settings: dict[str, str] = {}
    process: int = 0
    parent: int = 0  # the process that started it
    wrapper: str = ""
    divided_by: str = ""
    axes: tuple[MeshAxis, ...] = ()  # of the mesh, if the script has one
    bypassed: str = ""  # the wrapper of a model that is called without it
    schedules_by: str = ""  # "accelerate" if its schedules step once per rank
    run: str = ""  # a random name of the run, which its ranks share through their group's store


class SavedRecordingFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Required contents of a kept recording; `form` is the format version."""

    world: World
    steps: tuple[int, ...]
    form: int = 0


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def checksum_of(file: Path, most: int | None = None) -> str:
    """Return the digest of a nonempty file. It is memory-mapped, since copying large files is slow.
    Raises OSError, and ValueError for more than `most` bytes or something other than a file.
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
    private.write(file, msgspec.json.encode(record))


def with_masked_command(record: RankRecord) -> RankRecord:
    """Return a copy for other people: the command line may contain secrets, so it is masked."""
    return msgspec.structs.replace(record, arguments=tuple(masked_words(record.arguments)))


def read_record(file: Path, kind: type[Read]) -> Read:
    """Read a file of a recording. Raises UsageError if it is damaged."""
    try:
        return decode_json(read_bounded(file), kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{file} is damaged: {error}; run distcheck job again") from error
