"""A case: one strategy in one world, as plain values that JSON can hold. The name of a case is
unique and independent of the order of requests.
"""

import re
import shlex
from collections.abc import Sequence
from typing import Literal

import msgspec
import xxhash

from distcheck.records.decoding import Count, Int, Steps, World
from distcheck.records.layers import BITWISE, IN_FLOAT32, ROUNDING
from distcheck.records.odd_ranks import grouped

LossName = Literal["mean", "mean/world", "sum/global", "tokens"]

MOST_DEADLINE_S = 10**6
EXACT_DTYPES = ("float32", "float64")  # dtypes that hold sums of a batch of small integers exactly

CELL = ("strategy", "world", "backend", "device", "dtype", "workload", "seed")


class Adaptation(msgspec.Struct, frozen=True, kw_only=True):
    """Options for calling a strategy that was not written for distcheck; see
    `distcheck.training.adapters`.

        form       name of a form; None: chosen from the signature
        arguments  (name, value) pairs for its parameters; a value is a Python literal or `@name`
        variables  (name, value) pairs for global variables of its module
        finish     method of a wrapper to call after backward
        reset      method of a wrapper to call before every step
        without_data  ranks that have no shard of the batch, such as a parameter server
    """

    form: str | None = None
    arguments: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    finish: str | None = None
    reset: str | None = None
    without_data: tuple[Count, ...] = ()


class Delay(msgspec.Struct, frozen=True, kw_only=True):
    """A delay of one rank by `ms` milliseconds in every step of a case's first world: before
    backward (`collective` 0), or before its n-th collective of the step, from 1.
    """

    rank: Count
    collective: Count = 0
    ms: Count


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One request to run and judge. It holds names instead of objects, so it can be replayed."""

    id: str
    strategy: str
    world: World
    backend: str = "gloo"
    device: str = "cpu"
    dtype: str = "float32"
    workload: str = "cnn"
    data: str = "synthetic"
    data_dir: str | None = None
    batch: Count = 256
    steps: Steps = 3
    seed: Int = 0
    deadline_s: float = 30.0
    layers: tuple[str, ...] = (BITWISE, ROUNDING, IN_FLOAT32)
    rerun: bool = True
    reference_device: str | None = None
    adaptation: Adaptation = Adaptation()
    loss: LossName = "mean"
    accept: str | None = None
    left_out: str = ""  # why not to run it, if the user has said so
    delays: tuple[Delay, ...] = ()
    separate: bool = True  # if the rerun's ranks are forked from separate interpreters
    job: tuple[str, ...] = ()  # of a whole training job: the arguments of distcheck job
    schedules: Count = 0  # schedules of a simulated world to compare with the usual one
    preemptions: Count = 0  # maximum preemptions, fewest first; 0: random schedules
    schedule: str | None = None  # of its first world
    initial: str = ""  # initial slot-000.safetensors of a trace; "": the seed's model

    @property
    def cell(self) -> tuple[str | int, ...]:
        """The values that identify a case in a plan and in earlier runs, as in `CELL`."""
        return tuple(getattr(self, name) for name in CELL)

    @property
    def sibling_key(self) -> tuple[str, int, str, int]:
        """Return the key of cases that are shown together and run in the same part of a plan."""
        return self.strategy, self.world, self.backend, self.seed

    @property
    def with_data(self) -> tuple[int, ...]:
        """Return the ranks that read a shard of the batch, in order; by default all ranks."""
        without = self.adaptation.without_data
        return tuple(rank for rank in range(self.world) if rank not in without)

    @property
    def judging_device(self) -> str:
        """Return the device of references: that of the ranks, unless devices are compared."""
        return self.reference_device or self.device

    @property
    def adapter_options(self) -> list[str]:
        """Return the options that reproduce how the code is called, and the accepted deviation."""
        said = self.adaptation
        words = ["--as", said.form] if said.form else []
        for option, pairs in (("--arg", said.arguments), ("--set", said.variables)):
            for name, value in pairs:
                words += [option, f"{name}={value}"]
        words += ["--finish", said.finish] if said.finish else []
        words += ["--reset", said.reset] if said.reset else []
        for rank in said.without_data:
            words += ["--without-data", str(rank)]
        words += ["--loss", self.loss] if self.loss != "mean" else []
        return words + (["--accept", self.accept] if self.accept else [])

    @property
    def command_line(self) -> str:
        """Return the command that runs this cell from the strategy's code, on any machine."""
        if self.job:
            return shlex.join(["distcheck", "job", *self.job])
        words = ["distcheck", "verify", "--strategy", self.strategy, "--world", str(self.world)]
        words += ["--workload", self.workload, "--dtype", self.dtype, "--batch", str(self.batch)]
        words += ["--steps", str(self.steps), "--seed", str(self.seed), "--backend", self.backend]
        words += ["--device", self.device] if self.device != "cpu" else []
        words += ["--data", self.data] if self.data != "exact" else []
        words += ["--data-dir", self.data_dir] if self.data_dir else []
        words += ["--no-separate"] if not self.separate else []
        words += ["--schedules", str(self.schedules)] if self.schedules else []
        words += ["--preemptions", str(self.preemptions)] if self.preemptions else []
        words += ["--schedule", self.schedule] if self.schedule else []
        return shlex.join([*words, *self.adapter_options])


_LONGEST_BYTES = 150  # of a file name, 255 at most, to which others may append


def as_file_name(text: str) -> str:
    """Convert a text to a valid file name without shell metacharacters."""
    name = re.sub(r"[^\w.+-]+", "-", text).lstrip("-.")
    if len(name.encode()) <= _LONGEST_BYTES:
        return name
    begin = name.encode()[: _LONGEST_BYTES - 20].decode(errors="ignore")
    return f"{begin}-{xxhash.xxh3_64_hexdigest(name.encode())}"


def is_file_name(text: str) -> bool:
    """Return True if the text may be a result of `as_file_name` plus a suffix."""
    fits = len(text.encode()) <= _LONGEST_BYTES + 50
    return fits and re.fullmatch(r"[\w+-][\w.+-]*", text) is not None


def with_unique_ids(cases: Sequence[Case]) -> list[Case]:
    """Return the cases with unique ids; duplicates are removed."""
    alike = grouped(dict.fromkeys(cases), lambda case: case.id)
    names = {case: name for same in alike.values() for case, name in _distinguish(same).items()}
    return [msgspec.structs.replace(case, id=names[case]) for case in dict.fromkeys(cases)]


def _distinguish(same: Sequence[Case]) -> dict[Case, str]:
    """Name the difference of cases, in words if possible, else by a digest."""
    if len(same) == 1:
        return {same[0]: same[0].id}
    names = {case: case.id for case in same}
    if len({case.backend for case in same}) > 1:
        names = {case: f"{name}-{case.backend}" for case, name in names.items()}
    if len({case.seed for case in same}) > 1:
        names = {case: f"{name}-seed{case.seed}" for case, name in names.items()}
    taken = list(names.values())
    return {
        case: name if taken.count(name) == 1 else f"{name}-{case_digest(case)[:8]}"
        for case, name in names.items()
    }


def case_digest(case: Case) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(case))


def cases_digest(cases: Sequence[Case]) -> str:
    """Return a digest of cases in any order, without data folders and deadlines."""
    said = [msgspec.structs.replace(case, data_dir=None, deadline_s=1.0) for case in cases]
    return xxhash.xxh3_64_hexdigest(b"\n".join(sorted(map(msgspec.json.encode, said))))
