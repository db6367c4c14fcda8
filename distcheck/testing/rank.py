"""In a rank: joins the world, runs the test's body, and reports the result."""

import logging
import random
import sys
import time
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from distcheck import registry
from distcheck.errors import CannotRunError
from distcheck.errors.shown_text import shortened
from distcheck.machine import devices
from distcheck.testing import blas, examples, fixtures, leaks, session
from distcheck.testing.marker import WorldOptions
from distcheck.testing.messages import RUN, End, RankReport, RankWarning, encode_message
from distcheck.worlds.jobs import STORE, Descriptors, PerRankAttributes, Reporter, with_rank_state
from distcheck.worlds.local import late_compiler
from distcheck.worlds.messages import exception_text
from distcheck.worlds.rendezvous import Rendezvous, join

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class WorldView:
    """One rank's view of the world that it runs in.

    rank, size   number of this rank, and world size
    device       the device for this rank's tensors
    group        the process group of all ranks: torch's default group
    seed         the root seed; torch, random and numpy start from it, identically on every rank
    """

    def __init__(
        self, *, rank: int, size: int, device: "torch.device", group: "ProcessGroup", seed: int
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.group, self.seed = group, seed

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(self.group)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank. Values are pickled."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self.group)
        return values

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size} on {self.device}>"


_MOST_MESSAGE = 200_000  # characters of an exception that are passed to pytest
_CUT = "; pytest is given 200,000 of a text"


@dataclass(frozen=True, kw_only=True)
class PreparedTest:
    """A test for ranks to run: `body`, with a `Deferred` for each fixture that ranks set up."""

    item: pytest.Function
    options: WorldOptions
    body: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_view: WorldView | None = None
_prepared: PreparedTest | None = None


def set_test_for_ranks(prepared: PreparedTest | None) -> None:
    """Set the test that ranks will run. The pytest process calls this just before it forks."""
    global _prepared
    _prepared = prepared


def inherited_test() -> PreparedTest:
    """Return the test that was set when this rank was forked."""
    assert _prepared is not None, "ranks are forked from a process that has prepared a test"
    return _prepared


def current_view() -> WorldView | None:
    """Return this rank's view of its world; None in a process that is not a rank."""
    return _view


def _owned_state() -> PerRankAttributes:
    threads = registry.load("simulated").rank_threads_module()
    owned: PerRankAttributes = threads.per_rank_test_state(inherited_test().item)
    return owned


@RUN.does
@with_rank_state(_owned_state)
def run(rendezvous: Rendezvous, fds: Descriptors, reporter: Reporter) -> None:
    prepared = inherited_test()
    session.remove_plugin_hooks(prepared.item.config, reporter.say)
    enter_world(rendezvous, fds.get(STORE, -1), prepared.options, reporter)
    with examples.in_inherited_example():
        report, error = run_body(prepared)
    reporter.say(encode_message(report))
    if error is not None and report.end not in ("skipped", "rejected"):
        raise error  # a failed rank exits at once, so that its peers notice


def enter_world(
    rendezvous: Rendezvous, listen_fd: int, options: WorldOptions, reporter: Reporter
) -> None:
    """Create the process group and the view of the world."""
    global _view
    import torch
    import torch.distributed as dist

    from distcheck.machine import compat  # imports torch, which pytest must not

    torch.set_num_threads(1)
    blas.limit_blas_to_one_thread()
    # torch logs its own failed calls at DEBUG: a failure is reported better elsewhere.
    logging.getLogger("c10d-NullHandler-default").disabled = True
    if options.device == "cuda" and compat.is_cuda_lost_by_fork():
        raise CannotRunError(
            "the pytest process itself has queried CUDA, so its forks cannot use CUDA; query it "
            "in a test in a world, or set PYTORCH_NVML_BASED_CUDA_CHECK=1"
        )
    device = devices.enter(options.device, rendezvous.rank)
    reporter.progress(0, "rendezvous")
    join(rendezvous, listen_fd)
    group = dist.group.WORLD
    assert group is not None
    _view = WorldView(
        rank=rendezvous.rank,
        size=rendezvous.world,
        device=device,
        group=group,
        seed=options.seed,
    )
    seed_everything(options.seed)
    reporter.progress(0, "test")


def use_marker(options: WorldOptions) -> None:
    """Update the view for the marker of the next test."""
    assert _view is not None
    _view.seed = options.seed


def seed_everything(seed: int) -> None:
    import torch

    # torch.manual_seed would import torch._dynamo, in every rank.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    numpy_random = sys.modules.get("numpy.random")  # numpy itself imports it on first use
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)


def run_body(prepared: PreparedTest) -> tuple[RankReport, BaseException | None]:
    """Run the body with this rank's fixtures; return its report, and its exception if any."""
    __tracebackhide__ = True
    item = prepared.item
    before, properties = leaks.open_resources_now(), len(item.user_properties)
    compiler_was_loaded = late_compiler.is_loaded()
    if "torch" in sys.modules:
        late_compiler.install()
    logs = item.config.pluginmanager.getplugin("logging-plugin")
    if logs is not None:
        logs.report_handler.reset()
    has_process = not prepared.options.is_simulated
    error: BaseException | None = None
    body_s = 0.0
    with _seen_warnings(item) as seen:
        try:
            with (
                session.observe_test_threads(item),
                fixtures.capture_per_rank(item),
                fixtures.set_up_in_rank(item) as values,
            ):
                body, given, named = _own_copies(prepared)
                args = [fixtures.resolve_deferred(value, values) for value in given]
                kwargs = {k: fixtures.resolve_deferred(v, values) for k, v in named.items()}
                started = time.perf_counter()
                try:
                    result = body(*args, **kwargs)
                finally:
                    body_s = time.perf_counter() - started
                _refuse_a_result(item, result)
        except BaseException as raised:
            if not has_process and registry.load("simulated").called_os_exit(raised):
                raise
            error = raised
        error = session.warn_of_thread_errors(item, error)
    end = _end_of(error)
    # A failed test has rarely closed its resources; its ranks are discarded.
    goes_on = end in ("passed", "skipped", "rejected")
    left = leaks.find_leaks(before, has_process=has_process) if goes_on else leaks.LeakedResources()
    compiles = late_compiler.is_loaded()
    report = RankReport(
        end=end,
        reason="" if error is None else _shorten(exception_text(error)),
        warnings=tuple(_as_warning(warning) for warning in seen),
        log=logs.report_handler.stream.getvalue().strip() if logs is not None else "",
        left=left.phrases,
        left_stays=left.stays,
        preloads=(late_compiler.NAME,) if compiles and not compiler_was_loaded else (),
        properties=tuple(item.user_properties[properties:]),
        body_s=body_s,
        said=examples.values_to_pass_on(),
    )
    del item.user_properties[properties:]
    if report.end == "failed":
        assert error is not None
        report = _with_report(report, item, error)
    return report, error


def _own_copies(
    prepared: PreparedTest,
) -> tuple[Callable[..., object], Sequence[Any], Mapping[str, Any]]:
    if not prepared.options.is_simulated:
        return prepared.body, prepared.args, prepared.kwargs
    threads = registry.load("simulated").rank_threads_module()
    named = {k: threads.copy_for_rank(v, f"the value of {k}") for k, v in prepared.kwargs.items()}
    return threads.body_for_rank(prepared.body), prepared.args, named


def _shorten(text: str) -> str:
    return shortened(text, _MOST_MESSAGE, why=_CUT)


def _short_repr(error: BaseException) -> str:
    """Return a short representation of a long text, which pytest would wrap for minutes."""
    stack = "".join(traceback.format_tb(error.__traceback__))
    return f"{stack}{type(error).__name__}: {_shorten(exception_text(error))}"


def _refuse_a_result(item: pytest.Function, result: object) -> None:
    if result is not None:
        warnings.warn(
            pytest.PytestReturnNotNoneWarning(
                f"{item.nodeid} returned {type(result).__name__}; a test must assert, and return "
                "None"
            ),
            stacklevel=1,
        )


def _end_of(error: BaseException | None) -> End:
    if error is None:
        return "passed"
    if isinstance(error, pytest.skip.Exception | unittest.SkipTest):
        return "skipped"
    if examples.is_rejection(error):
        return "rejected"
    if isinstance(error, pytest.xfail.Exception):
        return "xfailed"
    return "exit" if isinstance(error, pytest.exit.Exception) else "failed"


def _with_report(report: RankReport, item: pytest.Function, error: BaseException) -> RankReport:
    """Add pytest's own report of the failure, created here, where the frames exist."""
    frame = error.__traceback__
    if frame is not None and frame.tb_next is not None and frame.tb_frame.f_globals is globals():
        error.__traceback__ = frame.tb_next  # distcheck's own frame, which --tb=native would show
    excinfo = pytest.ExceptionInfo.from_exception(error)
    is_short = len(exception_text(error)) <= _MOST_MESSAGE
    longrepr: Any = item.repr_failure(excinfo) if is_short else _short_repr(error)
    crash = getattr(longrepr, "reprcrash", None)
    as_test_report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=longrepr,
        when="call",
    )
    data = item.config.hook.pytest_report_to_serializable(config=item.config, report=as_test_report)
    kind = type(error)
    return msgspec.structs.replace(
        report,
        exception=f"{kind.__module__}:{kind.__qualname__}",
        message=crash.message if crash is not None else f"{kind.__name__}: {report.reason}",
        where=f"{crash.path}:{crash.lineno}" if crash is not None else "",
        longrepr=data,
    )


@contextmanager
def _seen_warnings(item: pytest.Function) -> Iterator[list[warnings.WarningMessage]]:
    """Record the warnings that pass the filters; if `recwarn` is used, leave them to it."""
    if "recwarn" in item.fixturenames:
        yield []
        return
    with warnings.catch_warnings(record=True) as seen:
        yield seen


def _as_warning(warning: warnings.WarningMessage) -> RankWarning:
    category = warning.category
    return RankWarning(
        text=str(warning.message),
        category=f"{category.__module__}:{category.__qualname__}",
        filename=warning.filename,
        line=warning.lineno,
    )
