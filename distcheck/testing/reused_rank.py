"""In a persistent rank: runs one test after another, and restores the process state in between."""

import gc
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from distcheck.errors import CannotRunError
from distcheck.testing import examples, fixtures, pytest_compat, rank, session
from distcheck.testing.marker import WorldOptions
from distcheck.testing.messages import KEPT_ELSE, SERVE, RankReport, RequestedTest, encode_message
from distcheck.testing.rank import PreparedTest
from distcheck.worlds import flight
from distcheck.worlds.jobs import STORE, Descriptors, Reporter
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.worker_pool import requests

BODY = "_distcheck_body"  # on the substitute for a Hypothesis test's body while it runs


@SERVE.does
def serve(rendezvous: Rendezvous, fds: Descriptors, reporter: Reporter) -> None:
    """Run tests in a persistent rank until the pytest process closes the channel."""
    first = rank.inherited_test()
    items = {item.nodeid: item for item in first.item.session.items}
    session.remove_plugin_hooks(first.item.config, reporter.say)
    rank.enter_world(rendezvous, fds[STORE], first.options, reporter)
    before = _Before()
    for test in requests(fds, RequestedTest):
        before.destroy_left_objects()
        item = items[test.nodeid]
        assert isinstance(item, pytest.Function)
        options = msgspec.msgpack.decode(test.options, type=WorldOptions)
        args, kwargs, asked, filters = _arguments(test)
        prepared = PreparedTest(
            item=item, options=options, body=_run_of(item), args=args, kwargs=kwargs
        )
        given = hasattr(item.obj, "hypothesis")
        with (
            before.put_back(),
            warnings.catch_warnings(),
            examples.in_new_example(given=given, final=test.final),
        ):
            warnings.filters[:] = filters  # type: ignore[index]
            rank.seed_everything(options.seed)
            rank.use_marker(options)
            _make_room(item)
            flight.forget()
            with fixtures.with_fixture_values(item, {**kwargs, **asked}):
                report, error = rank.run_body(prepared)
                report = before.with_group(report)
        sys.stdout.flush()
        sys.stderr.flush()
        reporter.say(encode_message(report))
        if error is not None and report.end not in ("skipped", "rejected"):
            raise error


_Arguments = tuple[tuple[Any, ...], dict[str, Any], dict[str, Any], list[Any]]


def _arguments(test: RequestedTest) -> _Arguments:
    try:
        args, kwargs, asked, filters = pickle.loads(test.arguments)
    except Exception as error:
        raise CannotRunError(
            f"the arguments of the test cannot be recreated in a reused world ({error}); "
            f"{KEPT_ELSE}"
        ) from error
    return args, kwargs, asked, filters


def _run_of(item: pytest.Function) -> Callable[..., object]:
    handle = getattr(item.obj, "hypothesis", None)
    if handle is None:
        body: Callable[..., object] = item.obj
        return body
    inner: Callable[..., object] = handle.inner_test
    return getattr(inner, BODY, inner)


def _make_room(item: pytest.Function) -> None:
    """Reset pytest's state for the fixtures of this test."""
    pytest_compat.reset_fixture_state(item)
    fixtures.defer_fixtures(item, fixtures.deferred_names(item, kept=True))


class _Before:
    """The process state before any test: environment, folder, umask, import path, signals, and
    torch's global settings. Saved once, because reading the environment takes as long as a small
    collective.
    """

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        from distcheck.machine import compat  # imports torch, which pytest must not

        self._environment, self._folder = dict(os.environ), os.getcwd()
        self._path = list(sys.path)
        os.umask(umask := os.umask(0o077))  # it can be read only by setting it
        self._umask = umask
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._dtype, self._threads = torch.get_default_dtype(), torch.get_num_threads()
        self._grad = torch.is_grad_enabled()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._group = dist.group.WORLD
        self._groups = set(compat.groups())

    def with_group(self, report: RankReport) -> RankReport:
        """Add to a report whether the default group was changed, and how many groups this rank has
        created: torch names a group by its number, so ranks with different counts would block each
        other.
        """
        import torch.distributed as dist

        from distcheck.machine import compat  # imports torch, which pytest must not

        if self._group is None or dist.group.WORLD is not self._group:
            return msgspec.structs.replace(report, left_stays=True)
        return msgspec.structs.replace(report, groups=compat.count_of_created_groups())

    @contextmanager
    def put_back(self) -> Iterator[None]:
        import torch

        try:
            yield
        finally:
            if dict(os.environ) != self._environment:
                os.environ.clear()
                os.environ.update(self._environment)
            os.chdir(self._folder)
            os.umask(self._umask)
            self._put_signals_back()
            sys.path[:] = self._path
            torch.set_default_dtype(self._dtype)
            torch.set_num_threads(self._threads)
            torch.set_grad_enabled(self._grad)
            if torch.are_deterministic_algorithms_enabled() != self._deterministic:
                # It imports many modules, so only if needed.
                torch.use_deterministic_algorithms(self._deterministic)

    def _put_signals_back(self) -> None:
        """Cancel timers, which would end the next test, and restore signal handlers."""
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, handler in self._signals.items():
            # None: a handler outside Python, which Python cannot set.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)

    def destroy_left_objects(self) -> None:
        """Destroy garbage and groups left by the last test. This waits for the next test, when
        every rank has finished the last one: destroying a group closes connections that a slower
        peer may still be using or opening. Garbage goes first and now, because the destructor of a
        DDP model or a group may block, and would do so within a collective of the next test.
        """
        import torch.distributed as dist

        from distcheck.machine import compat  # imports torch, which pytest must not

        gc.collect()
        groups = compat.groups()
        left: list[Any] = [group for group in groups if group not in self._groups]
        for group in left:
            if group in groups:  # the default one destroys the others
                dist.destroy_process_group(group)
