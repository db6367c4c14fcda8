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
from distcheck.job.inside import ending, state, tensors
from distcheck.job.inside.feeding import ALL, Feeding, Pairs
from distcheck.job.inside.folding import Folding, interacts, limit_memory
from distcheck.job.inside.forks import Forks
from distcheck.job.inside.loaders import Loaders
from distcheck.job.inside.processes import Processes
from distcheck.job.inside.recorder import numbers_of
from distcheck.job.settings import BY_RANK, IN_TURN, TOGETHER, Replayed, Role, Seen, Settings

DRAWS = 2
_ON_GPU = "on a GPU a kernel, and its rounding, depends on the shape of a batch"
_FAILS = "as one process the script fails in its first step"
_SAME = 1e-3  # chosen: rounding leaves 1e-6, and a batch size that is written down half or more


class Replayer:
    """Hears of a script through `hooks`, and hands it what the ranks had."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._folder = folder
        self._job = reading.read(Path(settings.recording))
        self._feeding = Feeding(self._job)
        self._apart = _ON_GPU if settings.in_processes else ""  # why batches stay by themselves
        self._folding = Folding(self._job, self._feeding, self._apart)
        self._copies = Processes(folder, settings) if settings.in_processes else Forks(folder)
        self._loaders = Loaders()
        self._mode, self._why = settings.role_mode, ""
        self._copy = settings.role
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._models: dict[int, torch.nn.Module] = {}
        self._seen, self._at = list[Seen](), 0  # `_at`: the place among the recorded steps
        self._begin()

    def _begin(self) -> None:
        self._begun = False
        self._passes = self._calls = 0
        self._found: dict[Role, dict[str, torch.Tensor] | None] = {}
        self._out: dict[str, torch.Tensor] = {}
        self._losses: list[float] = []
        self._sum, self._draws = 0.0, 0
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
        roles = [Role(ALL, draw) for draw in range(1, DRAWS + 1)]
        if self._mode == BY_RANK:
            roles = [Role(r, d) for r in range(self._job.world) for d in range(DRAWS + 1)]
        roles += self._folding.roles(self._step, DRAWS)
        found = self._copies.run(roles, self._step, self._mode)
        if not isinstance(found, Role):
            self._found = found
            return
        self._copy = found
        if found.pairs:
            limit_memory()

    def _choose(self) -> bool:
        """Finds out which batches the script takes as one process; True in a copy that tries."""
        passes = self._job.records[0, self._step].passes
        for role, mode in ((Role(0), "probe"), (Role(ALL), TOGETHER)):
            if mode == TOGETHER and (why := self._apart or interacts(self._job.at(self._step))):
                self._mode, self._why = BY_RANK, why
                break
            self._mode = mode
            each = [Role(rank) for rank in range(self._job.world)] if mode == TOGETHER else []
            tried = self._copies.run([role, *each], self._step, mode)
            if isinstance(tried, Role):
                self._copy = tried
                return True
            found = tried[role]
            if mode == "probe":
                if found is None:
                    self._fail(f"{_FAILS}: {self._copies.why.get(role, 'nothing was said')}")
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

    def _fail(self, why: str) -> None:
        if self._copy is not None:
            os._exit(1)
        self._write(why)
        ending.leave()

    def _write(self, failure: str = "") -> None:
        replayed = Replayed(
            mode=self._mode, why=self._why, steps=tuple(self._seen), failure=failure,
            unfolded=self._folding.why,
        )  # fmt: skip
        recording.write_json(self._folder / "replayed.json", replayed)

    # -- batches and passes ----------------------------------------------------------------------

    def _source(self, number: int) -> Pairs:
        """The ranks and their passes whose inputs are handed out now."""
        if self._copy is not None and self._copy.pairs:
            return self._copy.pairs
        if self._mode == IN_TURN:
            each = len(self._feeding.passes(self._step, 0))
            return [(number // each, number % each)]
        if self._copy is not None:
            return self._feeding.pairs(number, self._copy.rank)
        return self._feeding.pairs(number, 0 if self._mode == BY_RANK else ALL)

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
        pairs = self._source(self._passes)
        loader, epoch, number = place
        if self._mode == IN_TURN:
            each, world = len(self._feeding.passes(self._step, 0)), self._job.world
            rank = (number // each) % world
            number = number // (each * world) * each + number % each
            pairs = pairs if self._copy is not None and self._copy.pairs else [(rank, 0)]
        ahead = pairs[0][1]
        leaves = self._feeding.batch([(r, (loader, epoch, number + n - ahead)) for r, n in pairs])
        return None if leaves is None else self._replaced("a batch", batch, leaves)

    def enters(self, model: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Puts the recorded state in at the first pass of a step, and the recorded inputs."""
        self._models.setdefault(id(model), model)
        self._begin_step()
        if self._passes == 0:
            self._load_state()
        pairs = self._source(self._passes)
        if not self._feeding.has(self._step, pairs):
            if self._copy is not None:
                self._copies.leave(self._copy, {"more": torch.ones(1)}, self._step)
            self._fail(f"step {self._step}: as one process the script makes more forward passes")
        self._passes, self._calls = self._passes + 1, 0
        if len(pairs) == 1:
            tensors.set_random_state(self._feeding.random(self._step, pairs[0]))
        inputs = self._feeding.inputs(self._step, pairs)
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
        found = self._feeding.target(self._step, self._source(self._passes - 1), self._calls)
        return None if found is None or found.dtype != target.dtype else found.to(target.device)

    def losses(self, name: str, reduction: str, target: Any, ignored: int, value: Any) -> None:
        """Counts the losses of a pass, and adds those up that are sums over targets."""
        self._calls += 1
        self._folding.heard(name, reduction, value)
        is_sum = reduction == "sum" and value.numel() == 1
        self._sum += float(value.detach()) if is_sum else float("nan")

    def backward(self, loss: torch.Tensor) -> None:
        """Notes the loss; a copy with several passes in one batch is done."""
        if self._copy is not None and self._copy.pairs:
            taken = self._folding.take(self._copy, loss, self._parameters)
            self._copies.leave(self._copy, taken, self._step)
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
        if self._out or self._passes < self._expected():
            return  # something looks at the gradients between two passes
        self._gradients_ready()

    def _expected(self) -> int:
        """How many forward passes a step has, if the script makes as many as it did in the job."""
        record = self._job.records[0, self._step]
        each = max(1, len(record.passes))
        if self._mode == "probe" and any(clip.passes < each for clip in record.clips):
            return sys.maxsize  # clips in every pass, and may make more of them
        return each * (self._job.world if self._mode == IN_TURN else 1)

    def _gradients_ready(self) -> None:
        raw = {n: g / self._scale for n, g in state.gradients(self._parameters).items()}
        loss = torch.tensor(sum(self._losses) / self._scale, dtype=torch.float64)
        if self._copy is not None:
            about = {
                "passes": torch.tensor(float(self._passes)),
                "divisor": torch.tensor(state.divisor_of(float(loss), self._sum)),
            }
            self._copies.leave(self._copy, {**raw, "loss": loss, **about}, self._step)
            self._out = {"loss": loss}  # a process goes on, with what the optimizer got in the job
            return
        if self._mode == BY_RANK:
            combined = self._combined(0)
            if combined is None:
                self._fail(f"step {self._step}: as one rank the script fails")
                return
            loss = combined["loss"]
            raw = {n: g for n, g in combined.items() if n not in state.NOT_GRADIENTS}
            state.put(self._parameters, {n: g * self._scale for n, g in raw.items()})
        self._out = {f"raw/{n}": g for n, g in raw.items()} | {"loss": loss}
        draws = [one for draw in range(1, DRAWS + 1) if (one := self._combined(draw)) is not None]
        self._draws = len(draws)
        for name, gradient in {**raw, "loss": loss}.items():
            norms = [float((d[name] - gradient).double().norm()) for d in draws if name in d]
            self._out[f"spread/{name}"] = torch.tensor(max(norms, default=float("nan")))
        self._out |= self._folding.results(self._found, self._step)

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
        if not self._out and self._passes:
            self._gradients_ready()
        if not self._out:
            return
        self._out |= {f"step/{n}": g for n, g in state.gradients(self._parameters).items()}
        self._groups = tuple(numbers_of(group) for group in optimizer.param_groups)
        recorded = self._job.records[0, self._step].groups
        for group, then in zip(optimizer.param_groups, recorded, strict=False):
            plain = {k: v for k, v in group.items() if isinstance(v, float) and k in then}
            self._kept_settings.append(plain)
            group.update({key: then[key] for key in plain})
        then_held = {n: self._job.gradient("step", 0, self._step, n) for n in self._parameters}
        state.put(self._parameters, then_held)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the parameters, and gives the script its own settings back."""
        if not self._out:
            return
        for group, own in zip(optimizer.param_groups, self._kept_settings, strict=False):
            group.update(own)
        self._out |= {f"after/{n}": tensors.whole(p).clone() for n, p in self._parameters.items()}
        self._finish(skipped=False)

    def _finish(self, *, skipped: bool) -> None:
        if self._copy is None:
            self._note_step(skipped=skipped)
        self._at += 1
        steps = self._job.steps
        if self._at == len(steps) or not all(one.whole for one in self._job.at(steps[self._at])):
            ending.leave()
        self._begin()

    def _note_step(self, *, skipped: bool) -> None:
        out = {name: tensor.contiguous() for name, tensor in self._out.items()}
        save_file(out, self._folder / f"replay-{self._step:06d}.safetensors")
        finite = tuple(loss for loss in self._losses if abs(loss) < float("inf"))
        self._seen.append(Seen(
            step=self._step, groups=self._groups, losses=finite, draws=self._draws, skipped=skipped,
            folded=self._folding.kind,
        ))  # fmt: skip
        self._write()
