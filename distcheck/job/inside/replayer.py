"""Runs the script as one process with the ranks' batches, each step from the recorded state.

What a step reaches is written beside the recording: gradients when the last backward pass is over
(`raw/`), those that the optimizer is given (`step/`), and the parameters after a step in which the
optimizer was given the recorded gradients and settings (`after/`), so that one difference is not
found again as the next one. `spread/` holds how far gradients move, as a norm, when every
parameter moves by one ULP.
"""

import os
import sys
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from distcheck.job import reading, recording
from distcheck.job.checks.exchange import token_weights
from distcheck.job.inside import state, tensors
from distcheck.job.inside.feeding import ALL, Feeding
from distcheck.job.inside.forks import Forks, Role
from distcheck.job.inside.loaders import Loaders
from distcheck.job.inside.recorder import numbers_of
from distcheck.job.settings import BY_RANK, IN_TURN, TOGETHER, Replayed, Seen, Settings

DRAWS = 2
_SAME = 1e-3  # chosen: rounding leaves 1e-6, and a batch size that is written down half or more


class Replayer:
    """Hears of a script through `hooks`, and hands it what the ranks had."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._folder = folder
        self._job = reading.read(Path(settings.recording))
        self._feeding = Feeding(self._job)
        self._forks = Forks(folder)
        self._loaders = Loaders()
        self._mode, self._why = "", ""
        self._copy: Role | None = None
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._models: dict[int, torch.nn.Module] = {}
        self._seen: list[Seen] = []
        self._at = 0  # the place among the recorded steps
        self._begin()

    def _begin(self) -> None:
        self._begun = False
        self._passes = self._calls = 0
        self._found: dict[Role, dict[str, torch.Tensor] | None] = {}
        self._out: dict[str, torch.Tensor] = {}
        self._losses: list[float] = []
        self._sum = 0.0
        self._groups: tuple[dict[str, float], ...] = ()
        self._kept_settings: list[dict[str, Any]] = []

    @property
    def _step(self) -> int:
        return self._job.steps[self._at]

    # -- a step begins ---------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Forks the copies of a step, once, before its first batch or forward pass."""
        if self._begun or self._copy is not None:
            return
        self._begun = True
        if not self._mode and self._choose():
            return
        draws = range(1, DRAWS + 1)
        roles = [Role(ALL, draw) for draw in draws]
        if self._mode == BY_RANK:
            roles = [Role(r, d) for r in range(self._job.world) for d in (0, *draws)]
        found = self._forks.run(roles)
        if isinstance(found, Role):
            self._copy = found
        else:
            self._found = found

    def _choose(self) -> bool:
        """Finds out which batches the script takes as one process; True in a copy that tries."""
        passes = self._job.records[0, self._step].passes
        for role, mode in ((Role(0), "probe"), (Role(ALL), TOGETHER)):
            if mode == TOGETHER and (why := self._interacts()):
                self._mode, self._why = BY_RANK, why
                break
            self._mode = mode
            each = [Role(rank) for rank in range(self._job.world)] if mode == TOGETHER else []
            tried = self._forks.run([role, *each])
            if isinstance(tried, Role):
                self._copy = tried
                return True
            found = tried[role]
            if mode == "probe":
                if found is None:
                    self._fail("as one process the script fails in its first step")
                elif "more" in found:
                    self._mode = IN_TURN
                    self._why = "the script makes more backward passes where there are fewer ranks"
                    break
                elif int(found["passes"]) != len(passes):
                    self._fail(
                        f"as one process the script makes {int(found['passes'])} forward passes "
                        f"before its first step, and {len(passes)} as {self._job.world} ranks"
                    )
            elif found is None:
                self._mode, self._why = BY_RANK, "the ranks' batches do not fit into one"
            elif self._depends_on_size(tried, found):
                self._mode = BY_RANK
                self._why = "the loss of a larger batch is not the mean of its parts' losses"
        return False

    def _depends_on_size(
        self, tried: dict[Role, dict[str, torch.Tensor] | None], together: dict[str, torch.Tensor]
    ) -> bool:
        """Whether all samples in one batch have another gradient than the ranks' mean, as where a
        loss is divided by a batch size that is written into the script.
        """
        self._found = tried
        mean = self._mean(0)
        return mean is not None and state.distance(together, mean) > _SAME

    def _interacts(self) -> str:
        """Why samples of several ranks may not share a batch; empty where they may."""
        records = self._job.at(self._step)
        if any(record.batchnorm for record in records):
            return "BatchNorm normalises by the batch"
        if any(one.draws for record in records for one in record.passes):
            return "the forward pass draws random numbers"
        if any(one.autocast for record in records for one in record.passes):
            return "autocast rounds by the shape of a batch"
        return ""

    def _fail(self, why: str) -> None:
        if self._copy is not None:
            os._exit(1)
        replayed = Replayed(mode=self._mode, why=self._why, steps=tuple(self._seen), failure=why)
        recording.write_json(self._folder / "replayed.json", replayed)
        os._exit(0)

    # -- batches and passes ----------------------------------------------------------------------

    def _source(self, number: int) -> tuple[int, int]:
        """The rank, or all of them, and the pass whose inputs are handed out now."""
        if self._mode == IN_TURN:
            each = len(self._feeding.passes(self._step, 0))
            return number // each, number % each
        if self._copy is not None:
            return self._copy.rank, number
        return (0, number) if self._mode == BY_RANK else (ALL, number)

    def iterates(self, loader: Any, iterator: Any) -> None:
        """Numbers the loader as the recorder has."""
        self._loaders.iterates(loader, iterator)

    def length(self, loader: Any) -> int | None:
        """The length that a rank saw."""
        return self._feeding.lengths.get(self._loaders.number(loader))

    def is_over(self, iterator: Any) -> bool:
        """Whether a rank's epoch ended here."""
        place = self._loaders.place_of(iterator)
        if place is None or place[0] not in self._feeding.lengths:
            return False
        times = self._job.world if self._mode == IN_TURN else 1
        return place[2] >= self._feeding.lengths[place[0]] * times

    def batch(self, iterator: Any, batch: Any) -> Any:
        """The recorded batch in the structure of the script's own."""
        self._begin_step()
        place = self._loaders.next_place(iterator)
        if place is None:
            return None
        rank, _ = self._source(self._passes)
        if self._mode == IN_TURN:
            each, world = len(self._feeding.passes(self._step, 0)), self._job.world
            loader, epoch, number = place
            rank = (number // each) % world
            place = (loader, epoch, number // (each * world) * each + number % each)
        leaves = self._feeding.batch(place, rank)
        return None if leaves is None else self._replaced("a batch", batch, leaves)

    def enters(self, model: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Puts the recorded state in at the first pass of a step, and the recorded inputs."""
        self._models.setdefault(id(model), model)
        self._begin_step()
        if self._passes == 0:
            self._load_state()
        rank, number = self._source(self._passes)
        available = len(self._feeding.passes(self._step, max(rank, 0)))
        if number >= available or rank >= self._job.world:
            if self._copy is not None:
                self._forks.leave(self._copy, {"more": torch.ones(1)})
            self._fail(f"step {self._step}: as one process the script makes more forward passes")
        self._passes, self._calls = self._passes + 1, 0
        if rank != ALL:
            torch.set_rng_state(self._feeding.random(self._step, number, rank))
        inputs = self._feeding.inputs(self._step, number, rank)
        if inputs is None:
            self._fail(f"step {self._step}: the ranks' batches do not fit into one")
            return None
        if not inputs and not self._job.records[0, self._step].batches:
            self._fail("no tensor of a batch was seen that the replay could hand out")
        replaced = self._replaced("the model's arguments", (args, kwargs), inputs)
        return cast("tuple[Any, Any]", replaced)

    def _replaced(self, what: str, value: Any, given: list[torch.Tensor]) -> Any:
        """The same structure with other tensors; the replay ends where it is not the same."""
        free = [t for t in tensors.leaves(value) if not t.requires_grad]
        if len(free) != len(given):
            self._fail(
                f"step {self._step}: {what} had {len(given)} tensors on a rank, and {len(free)} as "
                "one process"
            )
        following = iter(given)

        def take(own: torch.Tensor) -> torch.Tensor:
            if own.requires_grad:
                return own
            recorded = next(following)
            # A whole number beside a batch counts its samples or targets, for which one process
            # has its own number: Hugging Face's Trainer hands the model num_items_in_batch.
            counts = recorded.dim() == own.dim() == 0 and float(recorded).is_integer()
            return own if counts and self._passes else recorded.to(own.device).clone()

        return tensors.replace_leaves(value, take)

    def leaves(self, model: torch.nn.Module) -> None:
        """Nothing is to be noted."""

    def _load_state(self) -> None:
        draw = 0 if self._copy is None else self._copy.draw
        kept = self._job.tensors(0, self._step)
        self._parameters = state.load(list(self._models.values()), kept, draw)

    def target(self, name: str, target: Any) -> Any:
        """The recorded target of the same loss."""
        if self._passes == 0 or not isinstance(target, torch.Tensor):
            return None
        rank, number = self._source(self._passes - 1)
        found = self._feeding.target(self._step, number, self._calls, rank)
        return None if found is None or found.dtype != target.dtype else found

    def losses(self, name: str, reduction: str, target: Any, ignored: int, value: Any) -> None:
        """Counts the losses of a pass, and adds those up that are sums over targets."""
        self._calls += 1
        is_sum = reduction == "sum" and value.numel() == 1
        self._sum += float(value.detach()) if is_sum else float("nan")

    def backward(self, loss: torch.Tensor) -> None:
        """Notes the loss."""
        if loss.numel() == 1:
            self._losses.append(float(loss.detach()))

    def backward_over(self) -> None:
        """Nothing is to be noted."""

    def collective(self, name: str, place: str) -> None:
        """Nothing is to be noted."""

    # -- the end of a step -----------------------------------------------------------------------

    def scales(self, scaler: Any) -> None:
        """Puts the recorded loss scale in."""
        scale = self._scale
        if scaler.is_enabled() and self._job.records[0, self._step].scale is not None:
            if scaler._scale is None:
                scaler._init_scale = scale
            else:
                scaler._scale.fill_(scale)

    @property
    def _scale(self) -> float:
        return self._job.records[0, self._step].scale or 1.0

    def gradients_ready(self) -> None:
        """A copy writes its gradients and ends; the parent goes on with the reference's."""
        if self._out or self._passes == 0:
            return
        raw = {n: g / self._scale for n, g in self._gradients().items()}
        loss = torch.tensor(sum(self._losses) / self._scale, dtype=torch.float64)
        if self._copy is not None:
            count = torch.tensor(float(self._passes))
            about = {
                "passes": count,
                "divisor": torch.tensor(state.divisor_of(float(loss), self._sum)),
            }
            self._forks.leave(self._copy, {**raw, "loss": loss, **about})
        if self._mode == BY_RANK:
            combined = self._combined(0)
            if combined is None:
                self._fail(f"step {self._step}: as one rank the script fails")
                return
            loss = combined["loss"]
            raw = {n: g for n, g in combined.items() if n not in state.NOT_GRADIENTS}
            self._put(raw)
        self._out = {f"raw/{n}": g for n, g in raw.items()} | {"loss": loss}
        draws = [one for draw in range(1, DRAWS + 1) if (one := self._combined(draw)) is not None]
        for name, gradient in {**raw, "loss": loss}.items():
            norms = [float((d[name] - gradient).double().norm()) for d in draws if name in d]
            self._out[f"spread/{name}"] = torch.tensor(max(norms, default=float("nan")))

    def _combined(self, draw: int) -> dict[str, torch.Tensor] | None:
        """The gradients of the copies of one draw: of all ranks together, or their mean."""
        if self._mode != BY_RANK:
            return self._found.get(Role(ALL, draw))
        return self._mean(draw)

    def _mean(self, draw: int) -> dict[str, torch.Tensor] | None:
        parts = [self._found.get(Role(rank, draw)) for rank in range(self._job.world)]
        weights = token_weights(self._job, self._step)
        divisors = [0.0 if part is None else float(part["divisor"]) for part in parts]
        if all(divisors):  # each rank's sum over its own targets; one process has one over all
            weights = [one / sum(divisors) for one in divisors]
            if len(set(divisors)) > 1 and self._feeding.is_ahead(self._step):
                self._fail(
                    f"step {self._step}: the loss is divided by a number that the script counts, "
                    "and its loader hands out a batch ahead of the step, of one rank for all"
                )
        return state.mean(parts, weights)

    def _put(self, raw: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.grad is not None and name in raw:
                    state.local(parameter.grad).copy_(raw[name] * self._scale)

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: tensors.whole(parameter.grad).clone()
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }

    def clipped(self, kind: str, most: float, norm: Any) -> None:
        """Nothing is to be noted."""

    def scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Gradients are as the last backward pass left them."""
        if scaler.is_enabled():
            self.gradients_ready()

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        """A step that the scaler skips is a step."""
        if scaler.is_enabled() and self._out:
            self._finish(skipped=True)

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes what the optimizer is given, and gives it what it was given in the job."""
        if not self._out:
            return
        self._out |= {f"step/{n}": g for n, g in self._gradients().items()}
        self._groups = tuple(numbers_of(group) for group in optimizer.param_groups)
        recorded = self._job.records[0, self._step].groups
        for group, then in zip(optimizer.param_groups, recorded, strict=False):
            plain = {k: v for k, v in group.items() if isinstance(v, float) and k in then}
            self._kept_settings.append(plain)
            group.update({key: then[key] for key in plain})
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                then_held = self._job.gradient("step", 0, self._step, name)
                if parameter.grad is not None and then_held is not None:
                    state.local(parameter.grad).copy_(then_held)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the parameters, and gives the script its own settings back."""
        if not self._out:
            return
        for group, own in zip(optimizer.param_groups, self._kept_settings, strict=False):
            group.update(own)
        self._out |= {f"after/{n}": tensors.whole(p).clone() for n, p in self._parameters.items()}
        self._finish(skipped=False)

    def _finish(self, *, skipped: bool) -> None:
        save_file(
            {name: tensor.contiguous() for name, tensor in self._out.items()},
            self._folder / f"replay-{self._step:06d}.safetensors",
        )
        finite = tuple(loss for loss in self._losses if abs(loss) < float("inf"))
        self._seen.append(
            Seen(
                step=self._step,
                groups=self._groups,
                losses=finite,
                draws=len(self._found),
                skipped=skipped,
            )
        )
        self._at += 1
        replayed = Replayed(mode=self._mode, why=self._why, steps=tuple(self._seen))
        recording.write_json(self._folder / "replayed.json", replayed)
        if self._at == len(self._job.steps) or not self._whole():
            sys.stdout.flush()
            os._exit(0)
        self._begin()

    def _whole(self) -> bool:
        return all(record.whole for record in self._job.at(self._step))
