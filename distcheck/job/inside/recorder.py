"""Writes down what a training script does, step by step, in a rank of the job."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from distcheck.job import recording
from distcheck.job.inside import ending, tensors
from distcheck.job.inside.loaders import Loaders
from distcheck.job.inside.step_file import StepFile
from distcheck.job.inside.terms import Heard, terms_of
from distcheck.job.recording import Call, Clip, LossCall, Pass
from distcheck.job.settings import Settings
from distcheck.training.leaf_hooks import LeafHook

_WAIT_S = 60.0  # for the other ranks' last step
_LAUNCHERS = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "OMPI_COMM_WORLD_")
_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def world_of() -> tuple[int, int]:
    """This process's rank, and how many there are: of the group, or what a launcher has said."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for rank, world in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if os.environ.get(rank, "").isdecimal() and os.environ.get(world, "").isdecimal():
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1


class Recorder:
    """Hears of a script through `hooks`; one step at a time is in memory."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._steps = 0  # that are over
        self._models: dict[int, torch.nn.Module] = {}
        self._hooks: dict[str, LeafHook] = {}
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self.loaders = Loaders()
        self._left = -1  # bytes of whole tensors that may still be written
        self._rank, self._world = 0, 1
        self._begin()

    def _begin(self) -> None:
        self._before: StepFile | None = None
        self._passes: list[Pass] = []
        self._losses: list[LossCall] = []
        self._heard: list[Heard] = []
        self._clips: list[Clip] = []
        self._calls: list[Call] = []
        self._local: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, torch.Tensor] = {}
        self._norms: dict[str, torch.Tensor] = {}
        self._raw: dict[str, torch.Tensor] | None = None
        self._at_step: dict[str, torch.Tensor] | None = None
        self._groups: tuple[dict[str, float], ...] = ()
        self._optimizer = ""
        self._scale: float | None = None

    @property
    def _active(self) -> bool:
        first = self._settings.from_step
        return first <= self._steps < first + self._settings.steps

    def iterates(self, loader: Any, iterator: Any) -> None:
        """Notes the length and the sampler's epoch."""
        self.loaders.iterates(loader, iterator)

    def batch(self, iterator: Any, batch: Any) -> Any:
        """Notes the samples."""
        if self._steps <= self._settings.from_step + self._settings.steps:
            self.loaders.batch(iterator, batch)
        return None

    def is_over(self, iterator: Any) -> None:
        """Ends nothing."""

    def length(self, loader: Any) -> None:
        """Numbers the loader."""
        self.loaders.number(loader)

    def enters(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Takes the state before the first forward pass of a step, and the inputs of each."""
        self._models.setdefault(id(model), model)
        if not self._active:
            return
        if self._before is None:
            self._start_step()
        self._raw = None  # something looked at the gradients between two passes
        given = [t for t in tensors.leaves((args, kwargs)) if not t.requires_grad]
        assert self._before is not None
        autocast = next((d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)), "")
        self._passes.append(
            Pass(
                inputs=tuple(self._before.add_data(t) for t in given),
                rows=tensors.rows_of(given) if given else (),
                random=tensors.random_digests(),
                exchanges=exchanges(model),
                exchange_s=exchange_seconds(model),
                autocast=str(torch.get_autocast_dtype(autocast)) if autocast else "",
            )
        )
        self._before.add(f"random/{len(self._passes) - 1}", tensors.random_state())
        for hook in self._hooks.values():
            hook.put_back()

    def leaves(self, model: torch.nn.Module) -> None:
        """Notes whether the forward pass drew random numbers."""
        if self._active and self._passes:
            drew = tensors.random_digests() != self._passes[-1].random
            self._change_pass(draws=drew or self._passes[-1].draws)

    def target(self, name: str, target: Any) -> None:
        """Replaces nothing."""

    def losses(self, name: str, reduction: str, target: Any, ignored: int, value: Any) -> None:
        """Notes how many targets count, and keeps them."""
        if not self._active or self._before is None:
            return
        counted, kept = targets_of(name, target, ignored), ""
        if isinstance(target, torch.Tensor):
            kept = "" if target.requires_grad else self._before.add_data(target)
        number = float(value.detach()) if value.numel() == 1 else float("nan")
        self._losses.append(
            LossCall(name=name, reduction=reduction, counted=counted, value=number, target=kept)
        )
        self._heard.append((name, reduction, value))

    def backward(self, loss: torch.Tensor) -> None:
        """Notes the loss."""
        if self._active and self._passes and loss.numel() == 1:
            held = tensors.any_held(self._parameters.values())
            terms, unread = terms_of(loss, self._heard)
            self._change_pass(
                loss=float(loss.detach()), losses=tuple(self._losses), holds=held, terms=terms,
                unread=unread,
            )  # fmt: skip
        self._losses, self._heard = [], []

    def backward_over(self) -> None:
        """Nothing: local gradients came by hooks."""

    def _change_pass(self, **changes: Any) -> None:
        import msgspec

        self._passes[-1] = msgspec.structs.replace(self._passes[-1], **changes)

    def _start_step(self) -> None:
        self._rank, self._world = world_of()
        if self._left < 0:
            self._left = self._settings.budget // self._world
            self._open()
        self._before = StepFile(recording.rank_folder(self._folder, self._rank), self._steps)
        self._name_parameters()
        for name, parameter in self._parameters.items():
            self._before.add_state(f"before/{name}", parameter, keep=self._rank == 0)
        for name, buffer in self._buffers().items():
            self._before.add_state(f"buffer/{name}", buffer, keep=self._rank == 0)

    def _name_parameters(self) -> None:
        for model in self._models.values():
            for long_name, parameter in model.named_parameters():
                name = tensors.plain_name(long_name)
                if self._parameters.get(name) is parameter:
                    continue
                self._parameters[name] = parameter
                if parameter.requires_grad and not hasattr(parameter, "full_tensor"):
                    self._hooks[name] = LeafHook(parameter, self._hook_of(name))

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            tensors.plain_name(name): buffer
            for model in self._models.values()
            for name, buffer in model.named_buffers()
        }

    def _hook_of(self, name: str) -> Any:
        def add(gradient: torch.Tensor) -> None:
            if self._before is None or not isinstance(gradient, torch.Tensor):
                return
            gradient = gradient.detach()
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            norm = torch.linalg.vector_norm(tensors.magnitudes(gradient).float())
            self._norms[name] = self._norms[name] + norm if name in self._norms else norm
            held = self._local.get(name)
            if held is not None and any(p.exchanges is not False for p in self._passes[:-1]):
                if name not in self._sizes:
                    self._sizes[name] = tensors.magnitudes(held)
                self._sizes[name] += tensors.magnitudes(gradient)
            self._local[name] = gradient.clone() if held is None else held.add_(gradient)

        return add

    def gradients_ready(self) -> None:
        """Takes the gradients as the last backward pass left them, once a step."""
        if self._before is not None and self._raw is None:
            self._raw = self._gradients()

    def _gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                found[name] = tensors.whole(gradient).clone()
        return found

    def clipped(self, kind: str, most: float, norm: Any) -> None:
        """Notes what clipping has found."""
        if self._before is not None:
            found = float(norm) if isinstance(norm, torch.Tensor | float) else None
            passes = len(self._passes)
            self._clips.append(Clip(kind=kind, most=float(most), norm=found, passes=passes))

    def scales(self, scaler: Any) -> None:
        """Changes nothing."""

    def scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Notes the scale that gradients were multiplied by."""
        if self._before is not None and scaler.is_enabled():
            self._scale = float(scaler.get_scale())
            self.gradients_ready()

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        """A step that the scaler skipped is a step."""
        if self._before is not None and scaler.is_enabled():
            self.steps(optimizer)
            self._finish(skipped=True)

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the gradients that the optimizer is given, and its settings."""
        if self._before is None:
            return
        if self._raw is None:
            self._raw = self._gradients()
        self._at_step = self._gradients()
        self._optimizer = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        self._groups = tuple(numbers_of(group) for group in optimizer.param_groups)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the parameters after the step, and writes it."""
        if self._before is not None:
            self._finish(skipped=False)
        elif not self._active:
            self._steps += 1

    def collective(self, name: str, place: str) -> None:
        """Notes where the script calls a collective."""
        if self._before is not None and len(self._calls) < recording.MOST_CALLS:
            self._calls.append(Call(name=name, place=place))

    def _finish(self, *, skipped: bool) -> None:
        file = self._before
        assert file is not None
        assert self._raw is not None
        for name, parameter in self._parameters.items():
            file.add_state(f"after/{name}", parameter, keep=self._rank == 0)
        by = 1.0 / self._scale if self._scale else 1.0
        file.add_gradients("local", self._local, by)
        file.add_gradients("sizes", self._sizes, by)
        for name, norm in self._norms.items():
            file.add(f"norms/{name}", norm * by)
        file.add_gradients("raw", self._raw, by)
        file.add_gradients("step", self._at_step or {}, 1.0)
        self._left -= file.write(
            self._left,
            rank=self._rank,
            world=self._world,
            optimizer=self._optimizer,
            groups=self._groups,
            passes=tuple(self._passes),
            batches=self.loaders.take(file),
            iterations=self.loaders.take_iterations(),
            clips=tuple(self._clips),
            calls=tuple(self._calls),
            absent=tuple(n for n in self._parameters if n not in self._raw),
            scale=self._scale,
            skipped=skipped,
            batchnorm=self._normalises(),
        )
        self._steps += 1
        self._begin()
        if not self._active and not self._settings.keep_going:
            self._end()

    def _normalises(self) -> bool:
        kind = torch.nn.modules.batchnorm._BatchNorm
        return any(
            isinstance(part, kind) and part.training
            for model in self._models.values()
            for part in model.modules()
        )

    def _open(self) -> None:
        mine = recording.rank_folder(self._folder, self._rank)
        mine.mkdir()
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        model = next(iter(self._models.values()))
        first = next(model.parameters())
        recording.write_json(
            mine / "rank.json",
            recording.RankRecord(
                rank=self._rank,
                world=self._world,
                arguments=tuple(sys.orig_argv),
                folder=os.getcwd(),
                backend=torch.distributed.get_backend() if grouped else "",
                device=first.device.type,
                torch=str(torch.__version__),
                threads=torch.get_num_threads(),
                variables={
                    name: value
                    for name, value in os.environ.items()
                    if name in _NAMES or name.startswith(_LAUNCHERS)
                },
                wrapper=type(model).__name__,
            ),
        )

    def _end(self) -> None:
        """Ends the process when every rank has written its last step, as one that succeeded."""
        mine = recording.rank_folder(self._folder, self._rank)
        (mine / "ended").touch()
        until = time.monotonic() + _WAIT_S
        others = [recording.rank_folder(self._folder, rank) for rank in range(self._world)]
        while time.monotonic() < until and not all((one / "ended").exists() for one in others):
            time.sleep(0.01)
        ending.leave()


def exchanges(model: torch.nn.Module) -> bool | None:
    """Whether DistributedDataParallel, which others may wrap (Fabric does), exchanges in this pass;
    None without one.
    """
    found = _ddp_in(model)
    return None if found is None else bool(found.require_backward_grad_sync)


def exchange_seconds(model: torch.nn.Module) -> float | None:
    """How long an exchange made backward passes wait so far, on average, as torch measures it in
    some of them: what it took, less what was computed meanwhile.
    """
    measured: dict[str, Any] = getattr(_ddp_in(model), "_get_ddp_logging_data", dict)()
    took = measured.get("avg_backward_comm_time", 0)
    hidden = measured.get("avg_backward_compute_comm_overlap_time", 0)
    return max(0, took - hidden) / 1e9 if took else None


def _ddp_in(model: torch.nn.Module) -> Any:
    kind = torch.nn.parallel.DistributedDataParallel
    return next((part for part in model.modules() if isinstance(part, kind)), None)


def targets_of(name: str, target: Any, ignored: int) -> int:
    """How many targets a loss counts: all but those that are ignored."""
    if not isinstance(target, torch.Tensor):
        return 0
    if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
        return int((target != ignored).sum())
    return target.numel()


def numbers_of(group: dict[str, Any]) -> dict[str, float]:
    """The settings of a group that are numbers; of pairs, as of betas, each by itself."""
    found: dict[str, float] = {}
    for key, value in group.items():
        several = value if isinstance(value, tuple) else (value,)
        for place, one in enumerate(several):
            if isinstance(one, torch.Tensor) and one.numel() == 1:
                one = one.item()
            if isinstance(one, bool | int | float) and key != "params":
                found[f"{key}[{place}]" if isinstance(value, tuple) else key] = float(one)
    return found
