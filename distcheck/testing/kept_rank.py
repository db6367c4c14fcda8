"""In a kept rank: one test after the other, with everything put back in between."""

import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from distcheck.testing import fixtures, rank
from distcheck.testing.marker import WorldOptions
from distcheck.testing.messages import KeptTest
from distcheck.testing.rank import Prepared
from distcheck.worlds import flight, messages
from distcheck.worlds.child import Reporter
from distcheck.worlds.rendezvous import Rendezvous

BODY = "_distcheck_body"  # on what stands in for a hypothesis test's body while it runs


def serve(payload: bytes, fds: list[int], reporter: Reporter) -> bytes:
    """The job of a kept rank: tests, until the pytest process lets go."""
    first = rank.inherited()
    rendezvous = msgspec.msgpack.decode(payload, type=Rendezvous)
    channel = _own_channel(fds[1:], rendezvous.rank)
    items = {item.nodeid: item for item in first.item.session.items}
    rank.enter(rendezvous, fds[0], first.options, reporter)
    number = 0
    while True:
        try:
            test, _ = messages.receive_with_fds(channel, KeptTest)
        except EOFError:
            return b""
        number += 1
        reporter.progress(number, "test")
        item = items[test.nodeid]
        assert isinstance(item, pytest.Function)
        options = msgspec.msgpack.decode(test.options, type=WorldOptions)
        args, kwargs = pickle.loads(test.arguments)
        prepared = Prepared(item=item, options=options, body=_body(item), args=args, kwargs=kwargs)
        with _put_back():
            rank.seed_everything(options.seed)
            rank.look_from(options)
            _make_room(item)
            flight.forget()
            report, error = rank.execute(prepared)
        sys.stdout.flush()
        sys.stderr.flush()
        reporter.say(msgspec.msgpack.encode(report))
        if error is not None and report.end != "skipped":
            raise error


def _own_channel(fds: list[int], number: int) -> socket.socket:
    for other, fd in enumerate(fds):
        if other != number:
            os.close(fd)
    return socket.socket(fileno=fds[number])


def _body(item: pytest.Function) -> Callable[..., object]:
    handle = getattr(item.obj, "hypothesis", None)
    if handle is None:
        body: Callable[..., object] = item.obj
        return body
    inner: Callable[..., object] = handle.inner_test
    return getattr(inner, BODY, inner)


def _make_room(item: pytest.Function) -> None:
    """Readies pytest's own state for fixtures of this test; nothing of it ran here before."""
    item._initrequest()
    stack = item.session._setupstate.stack
    stack.clear()
    for node in item.listchain():
        stack[node] = ([], None)
    fixtures.defer(item, fixtures.deferred_names(item, kept=True))


@contextmanager
def _put_back() -> Iterator[None]:
    """Environment, folder, import path, and what torch keeps globally."""
    import torch
    import torch.distributed as dist

    environment, folder, path = dict(os.environ), os.getcwd(), list(sys.path)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    grad, deterministic = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    groups = set(dist.distributed_c10d._world.pg_map)
    try:
        yield
    finally:
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = path
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)  # imports much; only if it must
        left: list[Any] = [g for g in dist.distributed_c10d._world.pg_map if g not in groups]
        for group in left:
            dist.destroy_process_group(group)
