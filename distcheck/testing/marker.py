"""Arguments of the marker: `@pytest.mark.world(4)`, `@pytest.mark.world([2, 4], deadline_s=30)`."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import pytest

from distcheck.backends import check_name, name_of
from distcheck.errors import UsageError
from distcheck.machine.devices import DEVICES
from distcheck.plan.scheduled import check_schedules
from distcheck.records import MOST_DEADLINE_S

NAME = "world"
SIZE_PARAMETER = "_distcheck_world_size"  # a name that no user's fixture has
_MOST_RANKS, _MOST_SIMULATED = 256, 1024
_KINDS = {
    "seed": int, "reuse": bool, "backend": str, "device": str, "schedules": int, "preemptions": int,
    "schedule": str,
}  # fmt: skip
_FORM = '@pytest.mark.world(4, backend="gloo", device="cpu", deadline_s=30, reuse=False)'


@dataclass(frozen=True, kw_only=True)
class WorldOptions:
    """A marker's arguments. Parametrization selects `size` from `sizes`."""

    sizes: tuple[int, ...]
    size: int
    backend: str = "gloo"
    device: str = "cpu"
    deadline_s: float = 30.0
    seed: int = 0
    reuse: bool = False
    schedules: int = 0
    preemptions: int = 0
    schedule: str = ""

    @property
    def is_simulated(self) -> bool:
        return name_of(self.backend) == "simulated"

    @property
    def is_shared(self) -> bool:
        """Return True if a process runs several tests, or a test for several ranks."""
        return self.reuse or self.is_simulated


def effective_marker(node: pytest.Item | pytest.Function) -> pytest.Mark | None:
    """Return the effective marker: the marker of the test, or else of its class, or else of its
    module.

    Raises pytest.UsageError if one of these has several different markers, because ignoring one
    would drop requested ranks. A class may override the marker of its bases.
    """
    for holder, _ in node.iter_markers_with_node(NAME):
        marks = [mark for mark in holder.own_markers if mark.name == NAME]
        if isinstance(holder, pytest.Class):  # the bases' markers come first
            own = holder.obj.__dict__.get("pytestmark", [])
            count = sum(mark.name == NAME for mark in (own if isinstance(own, list) else [own]))
            marks = marks[-max(count, 1) :]
        if any((m.args, m.kwargs) != (marks[0].args, marks[0].kwargs) for m in marks):
            told = " and ".join(map(_format_marker, marks))
            raise _refuse(f"was given several times, as {told}; remove all but one")
        return marks[0]
    return None


def _format_marker(mark: pytest.Mark) -> str:
    named = [f"{name}={value!r}" for name, value in mark.kwargs.items()]
    return f"{NAME}({', '.join([*map(repr, mark.args), *named])})"


def check_options(mark: pytest.Mark) -> WorldOptions:
    """Parse a marker. Raises pytest.UsageError with the given and the accepted values."""
    known = {one.name for one in fields(WorldOptions)} - {"sizes"}
    unknown = set(mark.kwargs) - known
    if unknown:
        raise _refuse(f"takes no {', '.join(sorted(unknown))}")
    arguments = dict(mark.kwargs)
    if mark.args:
        arguments["size"], *rest = mark.args
        if rest or "size" in mark.kwargs:
            raise _refuse("takes one size or a list of sizes")
    if "size" not in arguments:
        raise _refuse("needs the number of ranks")
    sizes = _sizes(arguments.pop("size"), arguments.get("backend", "gloo"))
    deadline_s = arguments.get("deadline_s", 30.0)
    if (
        isinstance(deadline_s, bool)
        or not isinstance(deadline_s, int | float)
        or not (0 < deadline_s <= MOST_DEADLINE_S)
    ):
        raise _refuse(f"was given deadline_s={deadline_s!r}; it takes a number of seconds above 0")
    for name, kind in _KINDS.items():
        if name in arguments and not isinstance(arguments[name], kind):
            raise _refuse(f"was given {name}={arguments[name]!r}; it takes a {kind.__name__}")
    device = arguments.get("device", "cpu")
    if device not in DEVICES:
        raise _refuse(f"was given device={device!r}; it takes {' or '.join(map(repr, DEVICES))}")
    options = WorldOptions(sizes=sizes, size=sizes[0], **arguments)
    _check_simulated(options)
    return options


def _check_simulated(options: WorldOptions) -> None:
    if options.is_simulated:
        for name, given, why in (
            ("reuse", options.reuse, "each test has its own process, which all ranks share"),
            ("device", options.device != "cpu", "its tensors are on the CPU"),
        ):
            if given:
                raise _refuse(f"was given {name} with backend='simulated', where {why}")
    for name in ("schedules", "preemptions", "schedule"):
        if getattr(options, name) and not options.is_simulated:
            raise _refuse(f"was given {name}, which needs backend='simulated'")
    try:
        if options.is_simulated:
            check_name(options.backend)
        check_schedules(
            options.schedules,
            options.schedule or None,
            options.backend,
            preemptions=options.preemptions,
        )
    except UsageError as error:
        raise _refuse(f"was given an invalid value: {error}") from None


def _sizes(given: object, backend: object) -> tuple[int, ...]:
    simulated = isinstance(backend, str) and name_of(backend) == "simulated"
    most = _MOST_SIMULATED if simulated else _MOST_RANKS
    sizes = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most:
            raise _refuse(f"was given the size {size!r}; it takes 1 to {most} ranks")
    if not sizes:
        raise _refuse("was given an empty list of sizes: nothing would run")
    return tuple(size for size in sizes if isinstance(size, int))


def _refuse(what: str) -> pytest.UsageError:
    return pytest.UsageError(f"the marker `world` {what}; for example {_FORM}")


def options_for_size(options: WorldOptions, size: int | None) -> WorldOptions:
    """Return the options with one of the sizes; None if the test was not parametrized.

    A list of sizes becomes several tests at collection. Raises pytest.UsageError if the marker
    differs from the one at collection.
    """
    chosen = options.size if size is None else size
    if chosen not in options.sizes or (size is None and len(options.sizes) > 1):
        raise _refuse(
            f"was given the sizes {list(options.sizes)} by add_marker or pytest.param(marks=...), "
            "when the tests were made already: a list of sizes belongs on the test function, its "
            "class or its module; one size may be given anywhere"
        )
    return replace(options, size=chosen)
