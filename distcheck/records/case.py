"""A case: what is asked of one strategy in one world, as names that JSON can hold."""

import shlex
from typing import Literal

import msgspec

from distcheck.records.decoding import Steps, World
from distcheck.records.layers import BITWISE, IN_FLOAT32, ROUNDING

LossName = Literal["mean", "mean/world", "sum/global", "tokens"]

MOST_DEADLINE_S = 10**6
EXACT_DTYPES = ("float32", "float64")  # which hold sums of a batch of small integers exactly


class Adaptation(msgspec.Struct, frozen=True, kw_only=True):
    """How to call a strategy that is not written for distcheck; see `distcheck.training.adapters`.

    form       the name of a form, or None: chosen from the signature
    arguments  (name, value) pairs for its parameters, values as Python literals or `@name`
    variables  the same for names of its module
    finish, reset  methods of a wrapper to call after backward, and before every step
    without_data  ranks that have no shard of the batch, such as a parameter server
    """

    form: str | None = None
    arguments: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    finish: str | None = None
    reset: str | None = None
    without_data: tuple[int, ...] = ()


class Delay(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that is slept for `ms` milliseconds in every step of a world: before backward
    (`collective` 0), or before its n-th collective of the step, counted from 1. Those of a case are
    for its first world.
    """

    rank: int
    collective: int = 0
    ms: int


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to run and judge. Holds names, not objects: it is the replay token."""

    id: str
    strategy: str
    world: World
    backend: str = "gloo"
    device: str = "cpu"
    dtype: str = "float32"
    workload: str = "cnn"
    data: str = "synthetic"
    data_dir: str | None = None
    batch: int = 256
    steps: Steps = 3
    seed: int = 0
    deadline_s: float = 30.0
    layers: tuple[str, ...] = (BITWISE, ROUNDING, IN_FLOAT32)
    rerun: bool = True
    reference_device: str | None = None
    adaptation: Adaptation = Adaptation()
    loss: LossName = "mean"
    accept: str | None = None
    left_out: str = ""  # why it is not to run, where the person has said so
    delays: tuple[Delay, ...] = ()
    separate: bool = True  # whether the rerun's ranks are forked from separate interpreters
    job: tuple[str, ...] = ()  # of a whole training job: what was given to distcheck job
    schedules: int = 0  # of a simulated world, that are compared with the usual one
    preemptions: int = 0  # those with at most so many, fewest first; 0: drawn ones
    schedule: str | None = None  # of its first world
    initial: str = ""  # a slot-000.safetensors of a trace to start from; empty: the seed's model

    @property
    def siblings(self) -> tuple[str, int, str, int]:
        """What the cases share that are shown together, and are run by one part of a plan."""
        return self.strategy, self.world, self.backend, self.seed

    @property
    def with_data(self) -> tuple[int, ...]:
        """The ranks that read a shard of the batch, in order: all, unless it was said otherwise."""
        without = self.adaptation.without_data
        return tuple(rank for rank in range(self.world) if rank not in without)

    @property
    def judged_on(self) -> str:
        """Where references are computed and compared: on the ranks' own kind of device, unless
        the case is there to compare with another.
        """
        return self.reference_device or self.device

    @property
    def adapter_words(self) -> list[str]:
        """The options that say again how the code is to be called, and what is accepted of it."""
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
        """What runs the case's cell from its strategy's code alone, on any machine."""
        if self.job:
            return shlex.join(["distcheck", "job", *self.job])
        words = ["distcheck", "verify", "--strategy", self.strategy, "--world", str(self.world)]
        words += ["--workload", self.workload, "--dtype", self.dtype, "--batch", str(self.batch)]
        words += ["--steps", str(self.steps), "--seed", str(self.seed), "--backend", self.backend]
        words += ["--device", self.device] if self.device != "cpu" else []
        words += ["--data", self.data] if self.data != "lattice" else []
        words += ["--data-dir", self.data_dir] if self.data_dir else []
        words += ["--no-separate"] if not self.separate else []
        words += ["--schedules", str(self.schedules)] if self.schedules else []
        words += ["--preemptions", str(self.preemptions)] if self.preemptions else []
        words += ["--schedule", self.schedule] if self.schedule else []
        return shlex.join([*words, *self.adapter_words])
