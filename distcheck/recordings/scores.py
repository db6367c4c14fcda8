"""Format of a file of per-token log-probabilities (safetensors), with its writer and reader.

    tokens     int64 [T]  token ids of all sequences, one after another, without padding
    lengths    int64 [S]  number of tokens of each sequence
    start      int64 [S]  position of the first scored token of each sequence, from 1
    logprobs   float32/float64 [N]  natural logarithms (nats) of the scored tokens' probabilities
    floor      [N]  the noise floor: RMS distance, over draws, of scores with perturbed parameters
    with/NAME  [N]  log-probabilities scored differently: `again`, `batch`, `padding`
    if/NAME    [N]  log-probabilities that a mistake would give, such as `temperature 0.9`

Only the first four are required. The metadata key `distcheck` has a JSON object, `ScoresAbout`.
Sequences are identified by their tokens: their order and padding are not part of the file.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from distcheck import private
from distcheck.errors import CannotRunError, UsageError
from distcheck.machine.numerics import spacing
from distcheck.recordings.jobs.reading import read_tensors
from distcheck.records.decoding import Int, decode_json

FORM = 1
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_REQUIRED = ("tokens", "lengths", "start")
SURELY_WRONG = 1000.0  # nats by which a mistake that cannot give a token is off
_MOST_SEQUENCES = 1 << 20
_MOST_TRIED = 1000  # Heuristic: sequences that are searched for the most similar one
_MOST_POSITIVE = 1e-3  # Heuristic: log_softmax in bfloat16 exceeds 0 by less
_TAIL = "write the file again with distcheck.scores"


class ScoresAbout(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a scoring. `weights` are digests of the parameters by name; `step` is the
    optimizer step after which they were scored.
    """

    form: int = FORM
    dtype: str = ""  # the coarsest dtype of the computation
    temperature: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    step: Int | None = None
    weights: dict[str, str] = {}


@dataclass(frozen=True)
class Scores:
    """The content of a file; all columns have one element per scored token."""

    file: Path
    about: ScoresAbout
    tokens: torch.Tensor
    lengths: torch.Tensor
    start: torch.Tensor
    columns: Mapping[str, torch.Tensor]

    @property
    def logprobs(self) -> torch.Tensor:
        return self.columns["logprobs"].double()

    @property
    def floor(self) -> torch.Tensor | None:
        return self.columns["floor"].double() if "floor" in self.columns else None

    @property
    def spacing(self) -> torch.Tensor:
        """The distance between adjacent numbers of the file's dtype, at most."""
        return self.logprobs.abs() * spacing(self.columns["logprobs"].dtype)

    def group(self, kind: str) -> dict[str, torch.Tensor]:
        """Return the columns `kind/NAME`, by name."""
        prefix = f"{kind}/"
        named = self.columns.items()
        return {n.removeprefix(prefix): c.double() for n, c in named if n.startswith(prefix)}

    @cached_property
    def sequence(self) -> torch.Tensor:
        """The number of each scored token's sequence, from 0."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths - self.start)

    @cached_property
    def position(self) -> torch.Tensor:
        """The position of each scored token in its sequence, from 0."""
        counts = self.lengths - self.start
        first = counts.cumsum(0) - counts
        return torch.arange(len(self.sequence)) - (first - self.start)[self.sequence]

    @cached_property
    def token(self) -> torch.Tensor:
        """The id of each scored token."""
        begin = self.lengths.cumsum(0) - self.lengths
        return self.tokens[begin[self.sequence] + self.position]

    def sequences(self) -> list[torch.Tensor]:
        return list(self.tokens.split(self.lengths.tolist()))


def write_scores(scores: Scores) -> None:
    """Write the file, or replace it atomically. Raises UsageError for contents that the reader
    refuses, and CannotRunError.
    """
    _check(scores)
    tensors = {"tokens": scores.tokens, "lengths": scores.lengths, "start": scores.start}
    about = {"distcheck": msgspec.json.encode(scores.about).decode()}
    try:
        with (
            private.held(str(scores.file)) as place,
            private.replaced_atomically(place) as draft,
        ):
            save_file({**tensors, **scores.columns}, draft, about)
    except (OSError, SafetensorError) as error:
        raise CannotRunError(f"{scores.file} cannot be written: {error}") from error


def read_scores(file: Path) -> Scores:
    """Read a file of any origin. Raises UsageError."""
    if not file.is_file():
        raise UsageError(f"{file} is not a file; pass a file that distcheck.scores wrote")
    columns = read_tensors(file, again=_TAIL)
    try:
        with safe_open(file, "pt") as opened:
            text = (opened.metadata() or {}).get("distcheck", "{}")
        about = decode_json(text.encode(), ScoresAbout)
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{file}: the metadata key distcheck is invalid: {error}; {_TAIL}"
        ) from error
    if about.form != FORM:
        raise UsageError(f"{file} has form {about.form}; this version reads form {FORM}; {_TAIL}")
    tokens, lengths, start = (columns.pop(n, torch.empty(0)) for n in _REQUIRED)
    return _check(Scores(file, about, tokens, lengths, start, columns))


def _check(scores: Scores) -> Scores:
    """Return the scores, or raise UsageError with the first problem."""
    problem = next((text for wrong, text in _problems(scores) if wrong), "")
    if problem:
        raise UsageError(f"{scores.file} {problem}; {_TAIL}")
    return scores


def _problems(scores: Scores) -> Iterator[tuple[bool, str]]:
    """Yield conditions and their sentences; each is evaluated only if those before are False."""
    for name in _REQUIRED:
        one = getattr(scores, name)
        is_wrong = one.dtype != torch.int64 or one.dim() != 1 or not len(one)
        yield is_wrong, f"has no {name}; expected an int64 tensor with one dimension"
    tokens, lengths, start = scores.tokens, scores.lengths, scores.start
    yield len(lengths) > _MOST_SEQUENCES, f"has more than {_MOST_SEQUENCES:,} sequences"
    yield len(lengths) != len(start), "has lengths and starts of different numbers of sequences"
    yield bool((lengths < 1).any() or (lengths > len(tokens)).any()), "has an impossible length"
    yield int(lengths.sum()) != len(tokens), "has lengths that do not add up to its tokens"
    outside = (start < 1) | (start >= lengths)
    number = int(outside.int().argmax())
    yield (
        bool(outside.any()),
        f"has no scored token in sequence {number}: start is {int(start[number])} of "
        f"{int(lengths[number])} tokens; scoring begins at position 1 or later",
    )
    count, columns = int((lengths - start).sum()), scores.columns
    yield "logprobs" not in columns, "has no logprobs"
    yield (
        columns["logprobs"].dtype not in (torch.float32, torch.float64),
        f"has logprobs of {columns['logprobs'].dtype}; expected float32 or float64",
    )
    for name, column in columns.items():
        kind, _, variant = name.partition("/")
        is_known = name in ("logprobs", "floor") or (kind in ("with", "if") and variant.split())
        yield not is_known, f"has an unknown tensor {name!r}"
        yield column.dtype not in DTYPES, f"has {name} of {column.dtype}; expected float32"
        yield (
            column.shape != (count,),
            f"has {name} of shape {tuple(column.shape)} for {count} scored tokens",
        )
        bad = ~column.isfinite() | (column < 0 if name == "floor" else column > _MOST_POSITIVE)
        at = int(bad.int().argmax())
        place = f"sequence {int(scores.sequence[at])}, position {int(scores.position[at])}"
        kind = "a distance" if name == "floor" else "the natural logarithm of a probability"
        yield (
            bool(bad.any()),
            f"has {float(column[at]):.4g} in {name} ({place}), which is not {kind}",
        )


def aligned(one: Scores, two: Scores) -> torch.Tensor:
    """Return the index of each scored token of `one` in the columns of `two`. Equal sequences are
    paired in their order. Raises UsageError for different sequences.
    """
    places = defaultdict[bytes, deque[int]](deque)
    for number, sequence in enumerate(two.sequences()):
        places[sequence.numpy().tobytes()].append(number)
    numbers, missing = [], []
    for number, sequence in enumerate(one.sequences()):
        same = places[sequence.numpy().tobytes()]
        if same:
            numbers.append(same.popleft())
        else:
            missing.append(number)
    others = sorted(number for same in places.values() for number in same)
    if missing or others:
        raise UsageError(_describe_missing(one, missing, two, others))
    starts = two.start[numbers]
    if not torch.equal(one.start, starts):
        at = int((one.start != starts).int().argmax())
        raise UsageError(
            f"{one.file} scores sequence {at} from position {int(one.start[at])} on, and "
            f"{two.file} from position {int(starts[at])} on; pass the same start= for both"
        )
    counts = two.lengths - two.start
    first = (counts.cumsum(0) - counts)[numbers]
    return first[one.sequence] + one.position - one.start[one.sequence]


def _describe_missing(one: Scores, missing: list[int], two: Scores, others: list[int]) -> str:
    if not missing:
        return _describe_missing(two, others, one, missing)
    number, theirs = missing[0], two.sequences()
    sequence = one.sequences()[number]
    text = f"sequence {number} of {one.file} is not in {two.file}"
    if not others:
        return f"{text}, which has {len(missing)} fewer; score the same sequences with both engines"

    def common_ends(other: torch.Tensor) -> int:
        return _common(sequence, other) + _common(sequence.flip(0), other.flip(0))

    nearest = max(others[:_MOST_TRIED], key=lambda n: common_ends(theirs[n]))
    other, at = theirs[nearest], _common(sequence, theirs[nearest])
    text = f"{text}; the most similar one there is {nearest}, and "
    if at == min(len(sequence), len(other)):
        return f"{text}it has {len(other)} tokens, not {len(sequence)}; compare equal sequences"
    return (
        f"{text}the first token that differs is at position {at}: {int(sequence[at])} and "
        f"{int(other[at])}; use the same tokenizer and chat template"
    )


def _common(one: torch.Tensor, two: torch.Tensor) -> int:
    """Return the length of the common prefix."""
    least = min(len(one), len(two))
    return int((one[:least] == two[:least]).int().cumprod(0).sum())
