"""Jobs that run in probing processes: one checks whether a backend is available, the other is a
rank that performs probes in order and reports each result.

After each call, the ranks exchange its status through the store. No rank runs ahead, and every rank
knows whether the process group may be out of sync. If so, the ranks create a new group, which has
new connections and counters.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from distcheck import backends
from distcheck.addons.backend_probe import patterns
from distcheck.addons.backend_probe.operations import OPERATIONS
from distcheck.addons.backend_probe.patterns import Value
from distcheck.addons.backend_probe.records import (
    LOOK,
    NOT_CALLED,
    PROBE,
    Availability,
    AvailabilityRequest,
    Probe,
    ProbeRequest,
    RankResult,
    Status,
)
from distcheck.addons.backend_probe.scene import (
    Buffer,
    Buffers,
    Layout,
    ProbedCall,
    ProbeScene,
    WrongAnswerError,
    buffer_layout,
    initial_output_values,
    unchangeable_values,
)
from distcheck.errors.shown_text import text_to_report
from distcheck.machine import devices, seeds
from distcheck.training.loading import load_backend
from distcheck.verification import inspection
from distcheck.worlds.jobs import STORE, Descriptors, Reporter
from distcheck.worlds.rendezvous import join, wait_for


def storage_before_call(buffer: Buffer, layout: Layout, dtype: str) -> list[Value]:
    """Return the contents of a storage before the call. Outputs are filled with values that are
    wrong after the call.
    """
    values = buffer.before
    if values is None:
        values = initial_output_values(buffer.after or (), dtype)
    return layout.place(values, unchangeable_values(dtype, layout.size))


def find_difference(
    *, actual: list[Any], buffer: Buffer, layout: Layout, scene: ProbeScene, before: list[Value]
) -> str:
    """Compare a storage with its expected contents after the call. Return a description of the
    first error, or an empty string.
    """
    around = unchangeable_values(scene.dtype, layout.size)
    required: list[Any] = (
        buffer.after if buffer.after is not None else _values_in_layout(actual, layout)
    )
    expected = layout.place(required, around)
    if actual == expected:
        return ""
    wrong = [i for i, (a, e) in enumerate(zip(actual, expected, strict=True)) if a != e]
    if scene.reduction == "AVG" and buffer.after is not None:
        wrong = [i for i in wrong if not _is_mean(actual[i], expected[i], scene)]
    return _describe(wrong, actual, expected, before, layout) if wrong else ""


def _values_in_layout(storage: list[Any], layout: Layout) -> list[Any]:
    rows, cols = layout.shape
    down, right = layout.strides
    return [
        storage[layout.offset + row * down + col * right]
        for row in range(rows)
        for col in range(cols)
    ]


def _is_mean(actual: Any, expected: Any, scene: ProbeScene) -> bool:
    """Return True if a value is within the bound of a mean. Elements around the buffer are integers
    and must be exact. NaN is never accepted.
    """
    if isinstance(expected, int):
        return False
    return bool(abs(actual - expected) <= patterns.mean_bound(scene.dtype, expected, scene.world))


def _describe(
    wrong: Sequence[int],
    actual: list[Any],
    expected: list[Any],
    before: list[Value],
    layout: Layout,
) -> str:
    rows, cols = layout.shape
    down, right = layout.strides
    places = {
        layout.offset + row * down + col * right: (row, col)
        for row in range(rows)
        for col in range(cols)
    }
    inside = [index for index in wrong if index in places]
    outside = len(wrong) - len(inside)
    parts = []
    if inside:
        first = inside[0]
        row, col = places[first]
        text = f"[{row},{col}] is {_show(actual[first])}, expected {_show(expected[first])}"
        text += f"; {len(inside)} of {rows * cols} elements differ"
        if all(actual[index] == before[index] for index in inside):
            text += ", all unchanged by the call"
        parts.append(text)
    if outside:
        parts.append(f"{outside} elements outside it were written")
    return "; ".join(parts)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, complex):
        return f"{_show(value.real)}{'' if str(value.imag)[0] in '-n' else '+'}{_show(value.imag)}j"
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value)


_MOST_GROUPS = 60  # each has sockets and threads; then a fresh world continues
_CALLS = 2  # of an operation without a root, to detect a repeated result
_ROWS, _COLS, _LARGE_COLS = 4, 6, 5003  # 4 x 5003 elements exceed 64 KiB, except in one-byte dtypes
_DETAIL_CHARACTERS = 240


@PROBE.does
def probe(job: ProbeRequest, fds: Descriptors, reporter: Reporter) -> None:
    warnings.simplefilter(
        "ignore"
    )  # torch renames collectives; their results are probed nevertheless
    seeds.pin_determinism()
    reporter.progress(-1, "load the backend")
    name = load_backend(job.rendezvous.backend)
    device = devices.enter(job.device, job.rendezvous.rank)
    reporter.progress(-1, "init_process_group")
    store = join(job.rendezvous, fds[STORE], registered=name)
    own = dist.PrefixStore("probes", store)  # type: ignore[attr-defined]
    prober = _Prober(job, device, own, reporter)
    for index, one in enumerate(job.probes, job.first):
        reporter.progress(index, one.name)
        if not prober.run(index, one) and not prober.renew_groups():
            break


class _Prober:
    """Runs the probes of one rank, and keeps its process group between them."""

    def __init__(
        self, job: ProbeRequest, device: torch.device, store: Any, reporter: Reporter
    ) -> None:
        self._rank, self._world = job.rendezvous.rank, job.rendezvous.world
        self._device = device
        self._store, self._reporter = store, reporter
        self._group: Any = None  # the default one
        self._sub_group: Any = None
        self._groups = 0
        self._refused = dict(job.refused)

    def run(self, index: int, probe: Probe) -> bool:
        """Run a probe. Return True if every rank completed every call correctly."""
        reason = self._refused.get(probe.key_in("transposed"))
        if probe.form == "mixed" and reason is not None:
            # Half of the ranks would refuse, and the others block: it would show nothing new about
            # the backend.
            self._report(index, "refused", f"{NOT_CALLED}{reason}", 0)
            return True
        operation = OPERATIONS[probe.operation]
        members = tuple(range(1 if probe.form == "sub-group" else 0, self._world))
        elements = 0
        said, told, detail = False, set[str](), ""
        calls = len(members) if operation.rooted else _CALLS
        for number in range(calls):
            turn = f"{index}/{number}"
            status, detail, compared = self._try(probe, members, number, turn)
            elements += compared
            if status in ("wrong", "refused") or number == calls - 1:
                # Report before the exchange: the rank that serves the store may die in the next
                # probe.
                self._report(index, status, detail, elements)
                said = True
            told = self._exchange(turn, status)
            if not told <= {"right", "absent"}:
                break
        if not said:
            self._report(index, status, "", elements)
        if told <= {"refused", "absent"}:
            self._refused[probe.key] = detail
        return told <= {"right", "absent"}

    def renew_groups(self) -> bool:
        """Create new process groups. Return False if that fails and a new world must continue."""
        self._groups += 1
        if self._groups >= _MOST_GROUPS:
            return False
        self._sub_group = None
        try:
            self._group = dist.new_group(list(range(self._world)))
        except Exception:
            return False
        return True

    def _try(
        self, probe: Probe, members: tuple[int, ...], number: int, turn: str
    ) -> tuple[Status, str, int]:
        """Perform one call. Return its status, a description, and the number of
        compared elements.
        """
        try:
            group = self._group_for(probe.form)
        except Exception as error:
            return "refused", f"new_group: {_first_line(error)}", 0
        if self._rank not in members:
            return "absent", "", 0
        operation = OPERATIONS[probe.operation]
        scene = self._scene(probe, members, number)
        buffers = operation.buffers(scene)
        form = probe.form
        if form == "mixed":  # alternate memory orders between ranks
            form = "transposed" if scene.rank % 2 else "plain"
        memory = _Memory(buffers, form, scene, self._device)
        call = ProbedCall(
            group=group,
            members=members,
            scene=scene,
            op=getattr(dist.ReduceOp, probe.reduction, None),
            asynchronous=probe.form == "async",
            store=self._store,
            turn=turn,
        )
        try:
            work = operation.perform(dist, memory.tensors, call)
            if call.asynchronous:
                if work is None:
                    raise WrongAnswerError("async_op=True returned no work to wait for")
                work.wait()
            operation.witness(call)
        except WrongAnswerError as error:
            return "wrong", str(error), memory.elements
        except Exception as error:
            return "refused", _first_line(error), 0
        difference = memory.find_difference()
        return ("wrong" if difference else "right"), difference, memory.elements

    def _group_for(self, form: str) -> Any:
        if form != "sub-group":
            return self._group
        if self._sub_group is None:
            self._sub_group = dist.new_group(list(range(1, self._world)))
        return self._sub_group

    def _scene(self, probe: Probe, members: tuple[int, ...], number: int) -> ProbeScene:
        rows = {"one": 1, "empty": 0}.get(probe.form, _ROWS)
        cols = {"one": 1, "large": _LARGE_COLS}.get(probe.form, max(_COLS, self._world))
        return ProbeScene(
            rank=members.index(self._rank),
            world=len(members),
            dtype=probe.dtype,
            rows=rows,
            cols=cols,
            salt=8 * probe.salt + number,
            reduction=probe.reduction or "SUM",
            root=number if OPERATIONS[probe.operation].rooted else 0,
        )

    def _report(self, index: int, status: Status, detail: str, elements: int) -> None:
        result = RankResult(index=index, status=status, detail=detail, elements=elements)
        self._reporter.say(msgspec.msgpack.encode(result))

    def _exchange(self, turn: str, status: Status) -> set[str]:
        """Exchange the status of a call with the other ranks. Return the set of all statuses."""
        self._store.set(f"{turn}/ended/{self._rank}", status)
        keys = [f"{turn}/ended/{rank}" for rank in range(self._world)]
        wait_for(self._store, keys)
        told = self._store.multi_get(keys)
        return {bytes(one).decode() for one in told}


class _Memory:
    """The storages of one call, before and after the call."""

    def __init__(
        self, buffers: Buffers, form: str, scene: ProbeScene, device: torch.device
    ) -> None:
        self._scene = scene
        self._entries: list[tuple[str, Any, Layout, list[Any], torch.Tensor]] = []
        self.tensors: dict[str, list[torch.Tensor]] = {}
        for name, some in buffers.items():
            self.tensors[name] = []
            for number, buffer in enumerate(some):
                layout = buffer_layout(form, buffer.rows, scene.cols)
                before = storage_before_call(buffer, layout, scene.dtype)
                storage = torch.tensor(before, dtype=getattr(torch, scene.dtype), device=device)
                view = storage.as_strided(layout.shape, layout.strides, layout.offset)
                self.tensors[name].append(view)
                label = f"{name} {number}" if len(some) > 1 else name
                self._entries.append((label, buffer, layout, before, storage))

    @property
    def elements(self) -> int:
        """Number of elements in the storages, including those around the buffers."""
        return sum(layout.size for _, _, layout, _, _ in self._entries)

    def find_difference(self) -> str:
        """Return a description of the first error, or an empty string."""
        for label, buffer, layout, before, storage in self._entries:
            found = find_difference(
                actual=storage.tolist(),
                buffer=buffer,
                layout=layout,
                scene=self._scene,
                before=before,
            )
            if found:
                return f"{label}{found}" if found.startswith("[") else f"{label}: {found}"
        return ""


def _first_line(error: Exception) -> str:
    line = next(iter(text_to_report(str(error)).strip().splitlines()), "")
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return text if len(text) <= _DETAIL_CHARACTERS else f"{text[:_DETAIL_CHARACTERS]}..."


_OF_DEVICES = {"nccl": "cuda"}  # torch's backends that support one device type only


@LOOK.does
def report_availability(
    job: AvailabilityRequest, fds: Descriptors, reporter: Reporter
) -> Availability:
    """Return whether a backend is available. Runs in a separate process. Raises UsageError."""
    device = job.device or _OF_DEVICES.get(job.backend, "cpu")
    missing = _missing(job, device)
    seen = inspection.environment(job.backend, "cpu" if missing else device)
    environment = {**seen, "device": device}
    return Availability(device=device, missing=missing, environment=environment)


def _missing(job: AvailabilityRequest, device: str) -> str:
    name = job.backend
    if ":" in name:
        load_backend(name)
    elif name == "gloo" and not dist.is_gloo_available():
        return f"this build of torch ({torch.__version__}) has no gloo"
    elif name in _OF_DEVICES and not dist.is_nccl_available():
        return f"this build of torch ({torch.__version__}) has no {name}"
    elif name in _OF_DEVICES and device != _OF_DEVICES[name]:
        return f"{name} supports only {_OF_DEVICES[name]} tensors, not {device} tensors"
    elif reason := backends.missing(name) or backends.missing_for(name, job.world):
        return reason
    if device == "cuda" and not torch.cuda.is_available():
        return "torch detects no CUDA device"
    return ""
