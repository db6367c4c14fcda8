"""Guard of one optimizer, which makes the ranks compare their replicas every N steps."""

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from distcheck import __version__
from distcheck.errors import CannotRunError, UsageError
from distcheck.job.guard import audit, comparing, explaining, records, state
from distcheck.job.guard.audit import Audit
from distcheck.job.guard.exchange import LostError, Peers
from distcheck.job.guard.records import (
    LEFT_OUT,
    OTHER,
    OWN,
    Divergence,
    ReplicaFinding,
    TensorProjections,
)
from distcheck.job.guard.state import FIELDS, ReplicaState
from distcheck.job.guard.watched import MOST_ROWS, Finder, WatchedModel
from distcheck.job.inside.parameters import places_in
from distcheck.recordings.jobs.sketches import project
from distcheck.records.ledger import Ledger
from distcheck.worlds.ledger import StepLedger


def encode_measurements(own: Audit) -> bytes:
    """Encode the measurements of this rank for sending, and clear them."""
    rows, own.rows = own.rows, []
    return msgspec.msgpack.encode(rows)


def conclusion_of_audit(
    own: Audit, gathered: Sequence[bytes], ranks: Sequence[int], names: Mapping[int, str]
) -> tuple[ReplicaFinding | None, list[str]]:
    """Return the finding of an audit, and its warnings. `names` maps ids of parameters to their
    names.
    """
    remarks = []
    if own.left_out:
        remarks.append(
            f"{own.left_out} parameters are not audited: they are not trained, or sharded by "
            "something other than fully_shard"
        )
    rows = [msgspec.msgpack.decode(one, type=audit.Rows) for one in gathered]
    if not rows[0] or len({len(one) for one in rows}) > 1:
        return None, [
            *remarks,
            "an audit measured nothing, or different quantities on different ranks",
        ]
    rows = audit.sum_projections(rows, [leaf.copies for leaf in own.leaves])
    mean = audit.judge(rows, [own.roundoff(leaf) for leaf in own.leaves])
    if mean is None and own.is_early:
        return None, remarks
    if mean is None:
        return None, [*remarks, "all gradients were absent or zero, so an audit compared nothing"]
    if mean.wrong:
        wrong = [names.get(id(own.leaves[place].parameter), "?") for place in mean.wrong]
        where = sorted({ranks[at] for places in mean.wrong.values() for at in places})
        found = ReplicaFinding(
            kind=comparing.EXCHANGE, first=wrong[0], groups=(tuple(where),), differing=len(wrong),
            compared=mean.compared, names=tuple(wrong[:64]), what=OWN if mean.own else OTHER,
        )  # fmt: skip
        return found, remarks
    if mean.left_out:
        left = tuple(ranks[at] for at in mean.left_out)
        found = ReplicaFinding(
            kind=comparing.EXCHANGE, first="", groups=(left,), differing=0, compared=mean.compared,
            what=LEFT_OUT,
        )  # fmt: skip
        return found, remarks
    if not mean.is_even:
        shares = ", ".join(f"{one / sum(mean.weights):.4g}" for one in mean.weights)
        remarks.append(
            f"ranks have weights {shares} in the gradients passed to the optimizer, which is "
            "right if the script weights them by samples or tokens"
        )
    return None, remarks


Action = Literal["raise", "warn"] | Callable[[Divergence], None]
OnCheck = Callable[[dict[str, Any]], object]
FIRST = 2  # checked in addition to every `every`-th step: initial mistakes show there
_MOST_SUMS = 4  # differing tensors of a kind whose projections are exchanged
_FAILED = {**dict.fromkeys(FIELDS, 0), "failed": 1}


class GuardWarning(UserWarning):
    """Warning of a guard about a difference, or about state that it cannot compare."""


class DivergenceError(RuntimeError):
    """Raised if ranks differ. `divergence` is the finding; its `file` is the bundle."""

    def __init__(self, difference: Divergence) -> None:
        super().__init__(message(difference))
        self.divergence = difference


def message(difference: Divergence) -> str:
    """Return the text of a difference, and the command that explains it."""
    more = f"\ndistcheck explain {difference.file}" if difference.file else ""
    return f"distcheck.guard: {difference.text}{more}"


class Guard:
    """Compares replicas; created by `distcheck.guard`. `with` or `close()` ends it.

    checks       number of checks made
    compared     number of tensors in the last check; `checked_at`: the step of that check
    divergences  the first 64 findings, the oldest first
    ledger       the collectives of the second step, on the first rank
    remarks      warnings: state that cannot be compared, or possibly intended differences
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        action: Action,
        watched: WatchedModel | None,
        finder: Finder | None,
        group: Any,
        save: str | None,
        samples: bool,
        randomness: bool,
        timeout_s: float,
        initial: int | None = None,
        audit: Audit | None = None,
        on_check: OnCheck | None = None,
    ) -> None:
        self._audit, self._on_check = audit, on_check
        self._found: Divergence | None = None  # in the check that is being made
        self._suspected: ReplicaFinding | None = None  # by an audit, until the next step's
        self._optimizer, self._every, self._action = optimizer, every, action
        self._watched, self._finder = watched, finder
        self._save, self._samples, self._randomness = save, samples, randomness
        self._peers = Peers(group, timeout_s, len(FIELDS) + MOST_ROWS)
        self._is_state_divided = False
        self._initial = initial
        self._agreed_at = self.checked_at = -1
        self._seen: set[str] = set()
        self.steps = self.checks = self.compared = 0
        self.divergences: list[Divergence] = []
        self.remarks: list[str] = []
        self.is_closed = False
        self._handle: Any = None
        self._ledger = StepLedger()
        self.ledger: Ledger | None = None

    @property
    def rank(self) -> int:
        """The index of this process among the compared ranks."""
        return self._peers.rank

    @property
    def world(self) -> int:
        return len(self._peers.ranks)

    def begin(self, *, hears: bool) -> "Guard":
        """Start to count optimizer steps. If `hears` is False, the caller calls `stepped` after
        each step instead.
        """
        if hears:
            self._handle = self._optimizer.register_step_post_hook(lambda *_: self.stepped())
        if len(self._peers.ranks) == 1:
            self._remark("there is only one rank, so nothing is compared")
        elif self._audit is not None and hears and self._is_checked(1):
            self._audit.arm(1)
        return self

    def finish(self) -> None:
        """Make a last check at the end of training, if there were steps after the
        previous check.
        """
        if not self.is_closed and self.checked_at < self.steps:
            if self._watched is not None:
                self._watched.forget()
            self.check()
        if not self.is_closed and self._suspected is not None:
            last = msgspec.structs.replace(self._suspected, when=records.LAST)
            self._together(lambda: self._report_difference((last,), (), 0))

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the guard and remove its hooks from the optimizer and the model."""
        if not self.is_closed:
            self.is_closed = True
            self._peers.close()
        for part in (self._finder, self._watched, self._audit):
            if part is not None:
                part.close()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def stepped(self) -> None:
        """Count a step, and check it if a check is due."""
        if self.is_closed:
            return
        self.steps += 1
        self._note_collectives()
        if self._peers.arrivals is not None:
            self._peers.arrivals.made(self.steps)
        if self._finder is not None and self._finder.found:
            self._watched, self._finder = self._finder.found[0], None
        if self._is_checked(self.steps):
            self.check()
        elif self._suspected is not None:
            self._together(self._act_on_audit)
        follows = self._is_checked(self.steps + 1)
        if self._watched is not None:
            self._watched.forget()
            self._watched.armed = follows
        if self._audit is not None and not self.is_closed:
            self._audit.armed = False
            if follows or self._suspected is not None:
                model = None if self._watched is None else self._watched.model
                self._audit.arm(self.steps + 1, model)

    def _note_collectives(self) -> None:
        """Record the collectives between the first step and the second, on the first rank."""
        if self.rank or self.world == 1 or self.steps > FIRST:
            return
        if self.steps == FIRST:
            models = [] if self._watched is None else [self._watched.model]
            trained = [parameter for _, parameter in places_in(self._optimizer)]
            self.ledger = self._ledger.taken(self.steps - 1, trained, models)
        elif self.steps == FIRST - 1:
            self._ledger.begin()

    def _is_checked(self, step: int) -> bool:
        return len(self._peers.ranks) > 1 and (
            step % self._every == 0 or step == min(FIRST, self._every)
        )

    def check(self) -> Divergence | None:
        """Compare replicas now and act on the result. This is a collective call of all ranks."""
        return None if len(self._peers.ranks) == 1 else self._together(self._check)

    def _together(self, look: Callable[[], Divergence | None]) -> Divergence | None:
        """Run a collective part of a check. If not all ranks reach it, end the guard."""
        checks, self._found = self.checks, None
        try:
            return look()
        except LostError as error:
            self._report_lost_ranks(error)
            return None
        finally:
            if self.checks > checks or self._found is not None:
                self._report_check()

    def _report_check(self) -> None:
        """Call `on_check` on the first rank. Its exceptions become a warning."""
        if self._on_check is None or self._peers.rank != 0:
            return
        found = self._found
        causes = () if found is None else explaining.causes(found)
        try:
            self._on_check(
                {
                    "step": self.steps if found is None else found.step,
                    "agrees": found is None,
                    "checks": self.checks,
                    "tensors": self.compared,
                    "causes": [one.cause for one in causes],
                    "text": "" if found is None else found.text,
                    "file": "" if found is None else found.file,
                }
            )
        except Exception as error:
            self._remark(f"on_check raised {type(error).__name__}: {error}")

    def _check(self) -> Divergence | None:
        own, said = self._own_state()
        if self._peers.arrivals is not None:
            self._peers.arrivals.arrive(self.steps)
        own_rows = sorted(self._watched.rows) if self._watched is not None else []
        sent = [*own_rows, *[0] * (MOST_ROWS - len(own_rows))] if self._samples else []
        gathered = self._peers.gather([*(said[name] for name in FIELDS), *sent])
        self.checked_at = self.steps
        rows: list[dict[str, Any]] = [dict(zip(FIELDS, row, strict=False)) for row in gathered]
        for row, numbers in zip(rows, gathered, strict=True):
            row["rows"] = set(numbers[len(FIELDS) :]) - {0}
        found = self._judge(own, rows)
        return found if found is not None or self.is_closed else self._act_on_audit()

    def _act_on_audit(self) -> Divergence | None:
        """Evaluate the audit of this step. A deviation is audited again at the next step: a bug in
        the code recurs there; a hardware error usually does not.
        """
        if self._audit is None or not (self._audit.rows or self._suspected):
            return None
        gathered = self._peers.gather_bytes(encode_measurements(self._audit), "an audit")
        names = {id(p): name for name, p in places_in(self._optimizer)}
        if self._watched is not None:
            names |= {id(p): name for name, p in self._watched.parameters()}
        found, remarks = conclusion_of_audit(self._audit, gathered, self._peers.ranks, names)
        for remark in remarks:
            self._remark(remark)
        before, self._suspected = self._suspected, None
        if before is not None:
            before = msgspec.structs.replace(
                before, when=records.ONCE if found is None else records.AGAIN
            )
            return self._report_difference((before,), (), 0, step=self.steps - 1)
        self._suspected = found
        return None

    def _own_state(self) -> tuple[ReplicaState, dict[str, int]]:
        """Return the state of this rank. If this fails, the checks end on all ranks, but training
        continues.
        """
        try:
            if self._watched is not None and self._watched.failure is not None:
                raise self._watched.failure
            own = state.take(self._optimizer, self._watched)
            return own, state.numbers(
                own,
                step=self.steps,
                watched=self._watched,
                randomness=self._randomness,
                initial=self._initial,
            )
        except Exception as error:
            self._remark(f"it failed ({type(error).__name__}: {error}) and has stopped")
            return ReplicaState(), dict(_FAILED)

    def _judge(self, own: ReplicaState, rows: Sequence[dict[str, Any]]) -> Divergence | None:
        if any(row["failed"] for row in rows):
            ranks = tuple(
                r for r, row in zip(self._peers.ranks, rows, strict=True) if row["failed"]
            )
            self._remark(f"it failed on {records.abbreviated_ranks(ranks)} and has stopped")
            self.close()
            return None
        first, self.checks, self.compared = not self.checks, self.checks + 1, own.compared
        self._note_what_is_not_compared(own)
        kinds = comparing.differing_kinds(rows, first=first)
        if self._is_state_divided and comparing.STATE in kinds:
            kinds.remove(comparing.STATE)
        if len({row["statistics"] for row in rows}) > 1:
            self._remark(
                "running statistics of BatchNorm differ across ranks, and evaluation uses those "
                "of its own rank; use SyncBatchNorm, or broadcast them before evaluation"
            )
        findings, sums = self._look_closer(kinds, own, rows) if kinds else ((), ())
        if not findings:
            self._agreed_at = self.steps
            return None
        names = () if self._is_state_divided else own.state
        of_state = sum(" of " in n and n[:5] != "step " for n in names)
        return self._report_difference(findings, sums, of_state)

    def _note_what_is_not_compared(self, own: ReplicaState) -> None:
        if not own.compared:
            self._remark(
                "no tensor of this job can be compared: no model was called in training mode, or "
                "its parameters are sharded; pass model= or group="
            )
        elif own.left_out:
            self._remark(
                f"{own.left_out} tensors are not compared: they belong to no model that was "
                "called, or a library shards them"
            )

    def _look_closer(
        self, kinds: Sequence[str], own: ReplicaState, rows: Sequence[dict[str, Any]]
    ) -> tuple[tuple[ReplicaFinding, ...], tuple[TensorProjections, ...]]:
        """Exchange names and digests, and projections of the first tensors that differ."""
        others = self._documents(own)
        ranks = self._peers.ranks
        findings: list[ReplicaFinding] = []
        for kind in kinds:
            field = comparing.ALIKE.get(kind, ("", ""))[1]
            found: ReplicaFinding | None = None
            if kind == comparing.STATE and comparing.is_optimizer_state_sharded(
                [o["state"] for o in others]
            ):
                self._is_state_divided = True
                self._remark("the optimizer state is sharded and not compared")
                continue
            if field:
                found = comparing.first_differing_name(
                    kind, [other[field] for other in others], ranks
                )
            if kind == comparing.PARAMETERS and found is None:
                found = comparing.first_differing_shard(others, rows, ranks)
            findings.append(found or self._finding_in_numbers(kind, rows))
        with_sums = (comparing.PARAMETERS, comparing.STATE)
        names = [n for f in findings if f.kind in with_sums for n in f.names[:_MOST_SUMS]]
        return tuple(findings), self._sums(own, names)

    def _documents(self, own: ReplicaState) -> list[dict[str, dict[str, Any]]]:
        mine = {name: getattr(own, name) for name in comparing.NAMED}
        gathered = self._peers.gather_bytes(msgspec.json.encode(mine), "digests")
        return [msgspec.json.decode(data, type=dict[str, dict[str, Any]]) for data in gathered]

    def _finding_in_numbers(self, kind: str, rows: Sequence[dict[str, Any]]) -> ReplicaFinding:
        """Return a finding that follows from the numbers of the check alone."""
        ranks = self._peers.ranks
        if kind == comparing.SAMPLES:
            (one, two), shared, least = comparing.pairs_sharing_samples(rows)[0]
            return ReplicaFinding(
                kind=kind, first=kind, groups=((ranks[one], ranks[two]),), differing=shared,
                compared=least,
            )  # fmt: skip
        if kind == comparing.RANDOMNESS:
            places = comparing.groups_with_equal_streams(rows)
        else:
            field = "step" if kind == comparing.STEPS else comparing.ALIKE[kind][0]
            places = comparing.groups_of([row[field] for row in rows])
        values = tuple(str(row["step"]) for row in rows) if kind == comparing.STEPS else ()
        groups = tuple(tuple(ranks[place] for place in group) for group in places)
        return ReplicaFinding(kind=kind, first=kind, groups=groups, values=values)

    def _sums(self, own: ReplicaState, names: Sequence[str]) -> tuple[TensorProjections, ...]:
        """Return every rank's projections of the named tensors, if their sizes agree."""
        mine: dict[str, tuple[int, list[float]]] = {}
        for name in names:
            tensor = own.tensors.get(name)
            if tensor is not None and tensor.is_floating_point():
                sums = project(tensor)
                if bool(sums.isfinite().all()):
                    mine[name] = (tensor.numel(), sums.tolist())
        kind = dict[str, tuple[int, list[float]]]
        gathered = self._peers.gather_bytes(msgspec.json.encode(mine), "sums")
        of_ranks = [msgspec.json.decode(data, type=kind) for data in gathered]
        return tuple(
            TensorProjections(
                name=name,
                elements=of_ranks[0][name][0],
                by_rank=tuple(tuple(one[name][1]) for one in of_ranks),
            )
            for name in names
            if all(name in one for one in of_ranks) and len({one[name][0] for one in of_ranks}) == 1
        )

    def _report_difference(
        self,
        findings: tuple[ReplicaFinding, ...],
        sums: tuple[TensorProjections, ...],
        of_state: int,
        *,
        step: int | None = None,
    ) -> Divergence:
        watched = self._watched
        difference = Divergence(
            step=self.steps if step is None else step, agreed_at=self._agreed_at, every=self._every,
            ranks=tuple(self._peers.ranks), findings=findings, sums=sums,
            state_compared=of_state, optimizer=type(self._optimizer).__qualname__,
            wrapper=type(watched.model).__name__ if watched is not None else "",
            versions={"distcheck": __version__, "torch": str(torch.__version__),
                      "python": sys.version.partition(" ")[0]},
        )  # fmt: skip
        is_new = {one.kind for one in findings} - self._seen
        self._seen |= is_new
        if is_new and self._save is not None:
            difference = self._save_bundle(difference)
        self._found = difference
        if len(self.divergences) < 64:
            self.divergences.append(difference)
        if callable(self._action):
            self._action(difference)
        elif self._action == "raise":
            self.close()
            raise DivergenceError(difference)
        elif is_new and self._peers.rank == 0:
            warnings.warn(message(difference), GuardWarning, stacklevel=2)
        return difference

    def _save_bundle(self, difference: Divergence) -> Divergence:
        """Write a bundle on the first rank and share its file name with the others."""
        name = b""
        if self._peers.rank == 0:
            try:
                name = str(records.write(difference, Path(self._save or ""))).encode()
            except (OSError, CannotRunError) as error:
                self._remark(f"the bundle could not be written: {error}")
        name = self._peers.gather_bytes(name or b" ", "a file's name")[0].strip()
        return msgspec.structs.replace(difference, file=name.decode(errors="replace"))

    def _report_lost_ranks(self, error: Exception) -> None:
        arrivals = self._peers.arrivals
        missing = {} if arrivals is None else arrivals.missing(self.steps)
        self.close()
        ranks = [f"rank {self._peers.ranks[place]} ({why})" for place, why in missing.items()]
        who = f"{', '.join(ranks)} did not reach" if ranks else "not every rank reached"
        why = "ranks make different numbers of steps, or one has exited or waits elsewhere"
        said = f"distcheck.guard: {who} the check after step {self.steps}; {why} ("
        said += f"{str(error).splitlines()[0]})"
        if self._action == "raise":
            raise RuntimeError(said) from error
        warnings.warn(said, GuardWarning, stacklevel=2)

    def _remark(self, text: str) -> None:
        """Warn once, on the first rank."""
        if text not in self.remarks:
            self.remarks.append(text)
            if self._peers.rank == 0:
                warnings.warn(f"distcheck.guard: {text}", GuardWarning, stacklevel=2)


# -- start of a guard ------------------------------------------------------------------------------


_ending: list["weakref.ref[Guard]"] = []


@functools.cache
def _check_at_the_end() -> None:
    """Make every guard check once more, before the script destroys its process groups."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            for guard in [one for ref in _ending if (one := ref()) is not None]:
                guard.finish()
                guard.close()  # its group would otherwise continue, and wait for exited ranks
        destroy(group)

    for module in (dist, dist.distributed_c10d):
        setattr(module, "destroy_process_group", destroy_process_group)  # noqa: B010


def start(
    optimizer: Any,
    *,
    every: int,
    action: Any,
    model: torch.nn.Module | None,
    watched: WatchedModel | None = None,
    hears: bool = True,
    audit: bool | str = False,
    **about: Any,
) -> Guard:
    """Validate the arguments and start a guard. Raises UsageError."""
    optimizer = _inner_of(optimizer)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(f"every must be an integer of at least 1, not {every!r}")
    if not callable(action) and action not in ("raise", "warn"):
        raise UsageError(f'on_difference must be "raise", "warn" or a function, not {action!r}')
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not callable(about.get("on_check", print)) and about["on_check"] is not None:
        raise UsageError(f"on_check must be a function, not {about['on_check']!r}")
    audits = Audit(optimizer, _wire_of(audit)) if audit else None
    finder = None
    if watched is None and model is not None:
        watched = WatchedModel(model)
    elif watched is None:
        finder = Finder(functools.partial(has_parameters_of, weakref.ref(optimizer)))
    try:
        guard = Guard(
            optimizer, every=every, action=action, watched=watched, finder=finder, audit=audits,
            **about,
        )  # fmt: skip
    except BaseException:  # otherwise hooks would remain that cannot be removed
        for part in (finder, watched, audits):
            if part is not None:
                part.close()
        raise
    _ending.append(weakref.ref(guard))
    _check_at_the_end()
    return guard.begin(hears=hears)


def _wire_of(audit: bool | str) -> torch.dtype | None:
    if isinstance(audit, bool):
        return None
    if audit not in ("bfloat16", "float16"):
        raise UsageError(f'audit must be True, "bfloat16" or "float16", not {audit!r}')
    return getattr(torch, audit)  # type: ignore[no-any-return]


def has_parameters_of(
    optimizer: Callable[[], torch.optim.Optimizer | None], module: torch.nn.Module
) -> bool:
    there = optimizer()
    if there is None:
        return False
    own = {id(p) for group in there.param_groups for p in group["params"]}
    return any(id(p) in own for p in module.parameters())


def _inner_of(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside the wrappers of accelerate and Fabric."""
    seen = 0
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer, seen = inner, seen + 1
        if seen > 8:
            break
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"guard takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    return optimizer
