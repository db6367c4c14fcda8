"""Recordings that are made up: what a right job of two ranks writes, with something changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from distcheck.job import checks
from distcheck.job.checks.reference import checks_with_reference
from distcheck.job.inside.step_file import StepFile
from distcheck.job.replaying import Reference
from distcheck.job.settings import GROWTH, TERM, TERMS, ReplayedStep, ReplayResult
from distcheck.recordings.jobs import reading, records
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import (
    ClipCall,
    ForwardPass,
    LoadedBatch,
    LoaderIteration,
    LossCall,
    RankRecord,
    RecordedOps,
)
from distcheck.recordings.jobs.sketches import SLOTS
from distcheck.recordings.jobs.watched import ModuleCall, WatchedCalls, WatchedStep, WatchedTensor
from distcheck.recordings.recording import Kind
from distcheck.records import CheckResult

SHAPES = {"weight": (4, 3), "bias": (4,)}
LR = 0.5
Tensors = dict[str, torch.Tensor]


class Facts:
    """One rank's step, as a right job has it; a test changes what it is about."""

    def __init__(self, rank: int, step: int, world: int, before: Tensors) -> None:
        self.rank, self.step, self.world = rank, step, world
        self.before = before
        self.locals = [gradients(r, step) for r in range(world)]
        self.local = self.locals[rank]
        self.raw = mean(self.locals)
        self.sizes: Tensors = {}
        self.at_step: Tensors | None = None
        self.after: Tensors | None = None
        self.holds = tuple(SHAPES)  # the parameters of its optimizer
        self.written: Tensors = {}  # what parameters are when the optimizer begins to step
        self.groups: tuple[dict[str, float], ...] = ({"lr": LR},)
        self.rows = tuple(f"{rank}-{step}-{i}" for i in range(4))
        self.epoch = step
        self.passes = [self.a_pass(0)]
        self.inputs: tuple[torch.Tensor, ...] = ()  # of the first pass
        self.sampler_epoch: int | None = step
        self.sampler = "DistributedSampler"
        self.of_iteration: dict[str, Any] = {}  # what else its Iteration has
        self.clips: tuple[ClipCall, ...] = ()
        self.scale: float | None = None
        self.carried = False
        self.of_batch: dict[str, Any] = {}  # what else its Batch and its StepRecord have
        self.of_record: dict[str, Any] = {}
        self.skipped = False
        self.seen: WatchedStep | None = None  # of its modules
        self.ops: RecordedOps | None = None

    def a_pass(self, number: int, **about: Any) -> ForwardPass:
        call = LossCall(name="cross_entropy", reduction="mean", counted=4, value=2.0, target="")
        given = {"loss": 2.0, "losses": (call,), "rows": self.rows, **about}
        random = {"torch": f"{self.rank}-{self.step}-{number}"}
        return ForwardPass(inputs=(), random=random, batches=((0, self.epoch, self.step),), **given)

    def write(self, folder: Path, budget: int) -> Tensors:
        """Writes the step; returns the parameters after it."""
        file = StepFile(records.rank_folder(folder, self.rank), self.step)
        at_step = self.raw if self.at_step is None else self.at_step
        if self.inputs:
            names = tuple(file.add_data(one) for one in self.inputs)
            self.passes[0] = replaced(self.passes[0], inputs=names)
        after = self.after or {n: p - LR * at_step[n] for n, p in self.before.items()}
        for name in SHAPES:
            file.add_state(f"before/{name}", self.before[name], keep=self.rank == 0)
        for name in self.holds:
            is_part = len(self.holds) < len(SHAPES)
            file.add_after(name, after[name], keep=self.rank == 0 or is_part)
        file.note_written(self.written)
        raw, given = ({n: one[n] for n in self.holds} for one in (self.raw, at_step))
        kinds = {"local": self.local, "sizes": self.sizes, "raw": raw, "step": given}
        for kind, found in kinds.items():
            file.add_gradients(kind, found, 1.0)
        file.add_modules(self.seen)
        file.ops = self.ops
        file.write(
            budget, rank=self.rank, world=self.world, optimizer="torch.optim.sgd.SGD",
            groups=self.groups, passes=tuple(self.passes), clips=self.clips, scale=self.scale,
            skipped=self.skipped, carried=self.carried, backwards=len(self.passes),
            batches=(
                LoadedBatch(loader=0, epoch=self.epoch, number=self.step, leaves=(), rows=self.rows,
                      **self.of_batch),
            ),
            iterations=(
                LoaderIteration(
                    loader=0, epoch=self.epoch, sampler=self.sampler, shuffles=True,
                    sampler_epoch=self.sampler_epoch, **{"length": 4, **self.of_iteration},
                ),
            ),
            **self.of_record,
        )  # fmt: skip
        return after


def gradients(rank: int, step: int) -> Tensors:
    drawn = torch.Generator().manual_seed(100 * rank + step)
    return {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}


def mean(parts: list[Tensors]) -> Tensors:
    return {name: sum(part[name] for part in parts) / len(parts) for name in SHAPES}  # type: ignore[misc]


def make(
    folder: Path, change: Callable[[Facts], None] = lambda facts: None, *,
    world: int = 2, steps: int = 3, budget: int = 1 << 20,
) -> JobRecording:  # fmt: skip
    """The recording of a right job in which `change` has changed every rank's every step."""
    for rank in range(world):
        mine = records.rank_folder(folder, rank)
        mine.mkdir()
        records.write_json(
            mine / "rank.json",
            RankRecord(
                rank=rank, world=world, arguments=("python", "train.py"), folder=".",
                backend="gloo", device="cpu", torch="2",
            ),
        )  # fmt: skip
        records.write_json(mine / "read.json", records.RereadSamples(()))
        held = gradients(7, 0)
        for step in range(steps):
            facts = Facts(rank, step, world, held)
            change(facts)
            held = facts.write(folder, budget)
    return reading.read_recording(folder)


def reference(job: JobRecording, folder: Path, **changes: Any) -> Reference:
    """What a replay of a right job writes; `raw`, `after` are factors, `lr` is by step."""
    seen = []
    for step in job.steps:
        several = [gradients(rank, step) for rank in range(job.world)]
        weights = changes.get("weights", [1 / job.world] * job.world)
        raw = {n: sum(w * g[n] for w, g in zip(weights, several, strict=True)) for n in SHAPES}
        raw = {n: g * changes.get("raw", 1.0) for n, g in raw.items()}
        kept = job.tensors(0, step)
        before = {n: kept.get(f"before/{n}", torch.zeros(shape)) for n, shape in SHAPES.items()}
        own = {n: job.gradient(Kind.GRADIENT, job.holders(step, n)[0], step, n) for n in SHAPES}
        found = {f"raw/{n}": g for n, g in raw.items()}
        found |= {f"step/{n}": g * changes.get("clipped", 1.0) for n, g in raw.items()}
        found |= {f"spread/{n}": g.norm() * changes.get("spread", 1e-7) for n, g in raw.items()}
        found |= {f"after/{n}": p - changes.get("after", LR) * own[n] for n, p in before.items()}
        by, turned = changes.get("folded", lambda _: (None, 0.0))(step)
        if by is not None:
            noise = gradients(9, step)
            found |= {f"folded/{n}": g / by + turned * noise[n] for n, g in raw.items()}
            found |= {f"spread-folded/{n}": g.norm() * 1e-7 for n, g in raw.items()}
        if "terms" in changes:
            found |= {f"{TERM}1/{n}": g for n, g in changes["terms"](step).items()}
            found |= {f"{TERM}0/{n}": g - found[f"{TERM}1/{n}"] for n, g in raw.items()}
            sources = [("`ce`", "train.py:7"), ("`0.1 * aux`", "train.py:8")]
            encoded = bytearray(msgspec.json.encode(sources))
            found[TERMS] = torch.frombuffer(encoded, dtype=torch.uint8)
            found[GROWTH] = torch.tensor(changes.get("growth", [1.0, 1.0]), dtype=torch.float64)
        found["loss"] = torch.tensor(changes.get("loss", 2.0), dtype=torch.float64)
        found["spread/loss"] = torch.tensor(1e-7)
        save_file(found, folder / f"replay-{step:06d}.safetensors")
        rate = changes.get("lr", lambda _: LR)(step)
        losses = (2.0,) * len(job.records[0, step].passes)
        kind = changes.get("kind", "mean") if by is not None else ""
        seen.append(
            ReplayedStep(
                step=step, groups=({"lr": rate},), losses=losses, draws=2, folded=kind,
                clips=changes.get("clips", ()),
            )
        )  # fmt: skip
    return Reference(folder, ReplayResult(mode="together", why="", steps=tuple(seen)))


def judged(job: JobRecording, alone: Reference) -> list[CheckResult]:
    """What the checks say of a job, where it has this reference."""
    compared, agreed = checks_with_reference(job, alone)
    return [*checks.checks_without_reference(job, agreed), *compared]


def replaced(value: ForwardPass, **about: Any) -> ForwardPass:
    return msgspec.structs.replace(value, **about)


def _sums(value: float) -> torch.Tensor:
    return torch.full((SLOTS,), value, dtype=torch.float64)


def chain(*values: tuple[float, float], trains: bool = True) -> WatchedStep:
    """A chain of modules `a`, `b`, ...: the tensors before, between and after them, each with its
    gradient.
    """
    tensors = tuple(WatchedTensor((4, 4), f"{v}", trains, f"{g}") for v, g in values)
    calls = tuple(
        ModuleCall(name, "Linear", 0, 0, (place,), (place + 1,))
        for place, name in zip(range(len(values) - 1), "abcdefgh", strict=False)
    )
    backward = tuple(reversed(range(len(values))))
    watched = WatchedCalls(calls=calls, tensors=tensors, backward=backward)
    return WatchedStep(watched, torch.stack([torch.stack([_sums(v), _sums(g)]) for v, g in values]))
