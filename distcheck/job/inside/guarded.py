"""Installs a guard on every optimizer of a job at its first step."""

import atexit
import contextlib
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distcheck import private
from distcheck.errors.masking import masked
from distcheck.job.guard import guarding, state
from distcheck.job.guard.guarding import Guard
from distcheck.job.guard.records import GuardProgress
from distcheck.job.guard.watched import Finder, WatchedModel
from distcheck.job.settings import JobSettings


@dataclass
class _Entry:
    """A guard, its optimizer, and its last written state."""

    guard: Guard
    optimizer: torch.optim.Optimizer
    number: int
    noted: tuple[int, int] | None = None


class GuardedOptimizers:
    """Hooks on every optimizer step; nested steps of inner optimizers get no guard of their own."""

    def __init__(self, settings: JobSettings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._entries: dict[int, _Entry] = {}
        self._outermost: int | None = None
        self._has_failed = False
        self._finder = Finder(_is_trainable, several=True)

    def install(self) -> None:
        """Install the hooks, once per process."""
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._note_all)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _forget(self) -> None:
        self._has_failed = True
        self._entries.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._outermost not in (None, id(optimizer)):
            return
        self._outermost = id(optimizer)
        if self._outermost in self._entries or self._has_failed:
            return
        try:
            self._start_guard(optimizer)
        except Exception:
            self._has_failed = True
            with contextlib.suppress(OSError):
                private.write(self._folder / "defect", masked(traceback.format_exc()))

    def _start_guard(self, optimizer: torch.optim.Optimizer) -> None:
        watched = next((w for w in self._finder.found if _is_of(w, optimizer)), None)
        guard = guarding.start(
            optimizer, every=self._settings.every,
            action="warn" if self._settings.warns else "raise", model=None, watched=watched,
            hears=False, initial=state.initial(optimizer), group=None,
            save=self._settings.bundles, samples=True, randomness=self._settings.randomness,
            timeout_s=1800.0, audit=self._settings.audit,
        )  # fmt: skip
        self._entries[id(optimizer)] = _Entry(guard, optimizer, len(self._entries))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) != self._outermost:
            return
        self._outermost = None
        self._finder.close()
        entry = self._entries.get(id(optimizer))
        if entry is None:
            return
        try:
            entry.guard.stepped()
        finally:
            self._write_progress(entry)

    def _note_all(self) -> None:
        for entry in self._entries.values():
            entry.noted = None
            self._write_progress(entry)

    def _write_progress(self, entry: _Entry) -> None:
        said = (entry.guard.checks, len(entry.guard.remarks))
        if said != entry.noted:
            entry.noted = said
            name = type(entry.optimizer).__qualname__
            write_guard_progress(entry.guard, entry.number, name, self._folder)


def write_guard_progress(guard: Guard, number: int, optimizer: str, folder: Path) -> None:
    first = guard.divergences[0] if guard.divergences else None
    checked = GuardProgress(
        rank=guard.rank, world=guard.world, optimizer=optimizer, steps=guard.steps,
        checks=guard.checks, checked_at=guard.checked_at, compared=guard.compared,
        remarks=tuple(guard.remarks), ledger=guard.ledger,
        first="" if first is None else first.text, file="" if first is None else first.file,
    )  # fmt: skip
    file = folder / f"guard-{guard.rank:04d}-{os.getpid()}-{number}.json"
    with contextlib.suppress(OSError):
        private.write(file, msgspec.json.encode(checked))


def _is_trainable(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _is_of(watched: WatchedModel, optimizer: torch.optim.Optimizer) -> bool:
    return guarding.has_parameters_of(lambda: optimizer, watched.model)
