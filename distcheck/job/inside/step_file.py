"""Collects the tensors of one step of one rank until they are written, completely or as
projections.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import save_file

from distcheck import private
from distcheck.job.inside import tensors
from distcheck.machine import devices
from distcheck.recordings.jobs import records, sketches
from distcheck.recordings.jobs.records import RecordedOps, Shard, StepRecord
from distcheck.recordings.jobs.watched import SUMS, WatchedCalls, WatchedStep

_STATE = ("before/", "buffer/")


class ParameterAfterStep(NamedTuple):
    """A parameter after a step. It holds projections if only these were written."""

    digest: str
    dtype: torch.dtype
    shape: torch.Size
    sums: torch.Tensor | None


class StepFile:
    """Collects tensors by name, and digests of all tensors, including those that are not recorded.

    `last` holds the parameters after the previous step, as they are in the file of that step.
    Unchanged parameters are not written again (`recordings.jobs.reading` looks them up).
    """

    def __init__(
        self, folder: Path, step: int, last: Mapping[str, ParameterAfterStep] | None = None
    ) -> None:
        self._folder, self._step, self._last = folder, step, last or {}
        self.after: dict[str, ParameterAfterStep] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._digests: dict[str, str] = {}
        self._dtypes: dict[str, str] = {}
        self._parts: dict[str, Shard] = {}
        self._modules: WatchedCalls | None = None
        self.ops: RecordedOps | None = None
        self.has_restarted = False

    def digest(self, name: str) -> str | None:
        return self._digests.get(name)

    def differ(self, state: Mapping[str, torch.Tensor], kind: str = "before") -> bool:
        """Return True if a parameter or buffer has changed since it was recorded."""
        return any(self._changed_digests(state, kind))

    def note_written(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Record the digests of parameters that have changed since they were recorded."""
        written = self._changed_digests(parameters, "before")
        self._digests |= {f"written/{name}": now for name, now in written}

    def _changed_digests(
        self, state: Mapping[str, torch.Tensor], kind: str
    ) -> Iterator[tuple[str, str]]:
        for name, one in state.items():
            now = tensors.digest_of(tensors.local_shard_on_cpu(one))
            if now != self._digests.get(f"{kind}/{name}"):
                yield name, now

    def compare_only(self, names: Collection[str]) -> None:
        """Drop the digests of all other state, because it may differ across ranks."""
        for kind, _, name in [one.partition("/") for one in self._digests]:
            if f"{kind}/" in _STATE and name not in names:
                del self._digests[f"{kind}/{name}"]

    def restart(self) -> None:
        """Discard everything except the recorded state, which is now the state before the first
        pass.
        """
        for found in (self._kept, self._digests):
            whole: dict[str, Any] = dict(found)  # type: ignore[call-overload]
            for name in [n for n in whole if n.removeprefix("sums/").startswith(_STATE)]:
                value = found.pop(name)
                if not self.has_restarted and not name.startswith("sums/"):
                    found[f"start/{name}"] = value  # type: ignore[assignment]
        self.has_restarted = True

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._kept[name] = tensors.local_shard_on_cpu(tensor).clone()

    def add_data(self, tensor: torch.Tensor) -> str:
        """Record part of a batch, unless it is already recorded, and return its digest."""
        plain = tensors.local_shard_on_cpu(tensor)
        about = f"{plain.dtype}{tuple(plain.shape)}{tensors.digest_of(plain)}"
        name = records.digest(about.encode())
        if f"data/{name}" not in self._kept:
            self._kept[f"data/{name}"] = plain.clone()
        return name

    def add_state(self, name: str, tensor: torch.Tensor, *, keep: bool) -> None:
        """Record the digest of a parameter or buffer before the step; with `keep`, also its
        contents.
        """
        kind, _, of = name.partition("/")
        keep = self._is_part(name, tensor) or keep
        plain = tensors.local_shard_on_cpu(tensor)
        now = ParameterAfterStep(tensors.digest_of(plain), plain.dtype, plain.shape, None)
        self._digests[name] = now.digest
        last = self._last.get(of) if kind == "before" else None
        is_written = last is not None and last[:3] == now[:3] and (last.sums is None) == keep
        if keep and not is_written:
            self._kept[name] = plain.clone()
        elif not keep:
            known = last.sums if last is not None and is_written else None
            self._kept[f"sums/{name}"] = sketches.project(plain) if known is None else known

    def add_after(self, name: str, tensor: torch.Tensor, *, keep: bool) -> None:
        """Record a parameter after the step. It is not copied, because `write` follows
        immediately.
        """
        keep = self._is_part(f"after/{name}", tensor) or keep
        plain = tensors.local_shard_on_cpu(tensor)
        sums = None if keep else sketches.project(plain)
        self.after[name] = ParameterAfterStep(
            tensors.digest_of(plain), plain.dtype, plain.shape, sums
        )
        self._digests[f"after/{name}"] = self.after[name].digest
        self._kept[f"after/{name}" if sums is None else f"sums/after/{name}"] = (
            plain if sums is None else sums
        )

    def add_held(self, name: str, tensor: torch.Tensor, *, keep: bool) -> None:
        plain = tensors.local_shard_on_cpu(tensor)
        self._digests[name] = tensors.digest_of(plain)
        if self._is_part(name, tensor) or keep:
            self._kept[name] = plain.clone()

    def _is_part(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is sharded. In this case, record this rank's shard."""
        part = tensors.describe_shard(tensor)
        if part is not None:
            self._parts[name] = part
        return part is not None

    def add_gradients(
        self, kind: str, found: Mapping[str, torch.Tensor], by: float,
        parts: Mapping[str, Shard] | None = None,
    ) -> None:  # fmt: skip
        """Record gradients multiplied by `by`, a power of two that undoes a loss scale. `parts`
        describes sharded gradients. Gradients are not copied, because `write` follows immediately.
        """
        for name, gradient in found.items():
            plain = tensors.local_shard_on_cpu(gradient)
            if parts is not None and name in parts:
                self._parts[f"{kind}/{name}"] = parts[name]
            self._is_part(f"{kind}/{name}", gradient)
            plain = plain if by == 1.0 else plain * by
            self._digests[f"{kind}/{name}"] = tensors.digest_of(plain)
            if "sizes" not in kind:
                self._dtypes[name] = str(plain.dtype).removeprefix("torch.")
            if kind == "step" and self._digests.get(f"raw/{name}") == self._digests[f"step/{name}"]:
                continue  # not clipped: the reader takes raw
            self._gradients[f"{kind}/{name}"] = plain

    def add_modules(self, seen: WatchedStep | None) -> None:
        """Record module inputs and outputs, if any."""
        if seen is not None:
            self._modules, self._kept[SUMS] = seen

    def is_unchanged(self, names: Collection[str]) -> bool:
        """Return True if gradients still equal the sum over this rank's own passes."""
        pairs = [(self._digests.get(f"raw/{n}"), self._digests.get(f"local/{n}")) for n in names]
        return bool(pairs) and all(raw == local for raw, local in pairs)

    def write(self, budget: int, **about: Any) -> int:
        """Write the step, with complete tensors if they fit into `budget` bytes. Return its size in
        bytes.
        """
        kept = {**self._kept, **self._gradients}
        size = sum(t.numel() * t.element_size() for t in kept.values())
        whole = size <= budget
        if not whole:
            kept = {name: t for name, t in self._kept.items() if name.startswith("sums/")}
            for name, gradient in self._gradients.items():
                if name.startswith(("sizes/", "cleared")):
                    continue  # included in the magnitudes of local gradients, or not compared
                kept[name] = sketches.project(gradient)
                sizes = self._gradients.get(name.replace("local/", "sizes/", 1), gradient)
                kept[f"magnitude/{name}"] = sketches.project_magnitudes(sizes)
            self.after = {name: one for name, one in self.after.items() if one.sums is not None}
        stem = f"step-{self._step:06d}"
        with private.replaced_atomically(self._folder / f"{stem}.safetensors") as draft:
            save_file(_copy_shared_memory(kept), draft)
            checksum = records.checksum_of(draft)
        record = StepRecord(
            step=self._step,
            digests=self._digests,
            dtypes=self._dtypes,
            whole=whole,
            parts=self._parts,
            modules=self._modules,
            ops=self.ops,
            gpu_bytes=devices.gpu_bytes_taken(),
            checksum=checksum,
            **about,
        )
        records.write_json(self._folder / f"{stem}.json", _json_safe(record))
        return size if whole else 0


def _copy_shared_memory(kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that share memory, which a safetensors file cannot hold."""
    found, seen = {}, set()
    for name, one in kept.items():
        storage = one.untyped_storage()
        is_alone = storage.nbytes() == one.numel() * one.element_size()
        found[name] = one if is_alone and storage.data_ptr() not in seen else one.clone()
        seen.add(storage.data_ptr())
    return found


def _json_safe(record: StepRecord) -> StepRecord:
    """Remove losses that are not finite, since JSON has no NaN."""

    def sound(number: float | None) -> float | None:
        return None if number is None or number != number or abs(number) == float("inf") else number

    replace = msgspec.structs.replace
    return replace(
        record,
        passes=tuple(
            replace(
                p,
                loss=sound(p.loss),
                losses=tuple(replace(c, value=sound(c.value) or 0.0) for c in p.losses),
            )
            for p in record.passes
        ),
        clips=tuple(replace(c, most=sound(c.most), norm=sound(c.norm)) for c in record.clips),
        groups=tuple({k: sound(v) or 0.0 for k, v in g.items()} for g in record.groups),
    )
