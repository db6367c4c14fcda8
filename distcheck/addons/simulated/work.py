"""A started call (c10d's `Work`), and the future that torch chains to it."""

import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from distcheck.addons.simulated.calls import SimulatedCall
from distcheck.addons.simulated.world import SimulatedWorld
from distcheck.backends._python_group import PythonWork
from distcheck.machine import compat

_NO_LIMIT = timedelta(0)


class SimulatedWork(PythonWork):
    """One call, or several calls with a common `wait`. Results are written to the outputs when code
    waits for the work, so code that reads an output too early reads the old contents.
    """

    def __init__(
        self, world: SimulatedWorld, calls: Sequence[SimulatedCall], results: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._world, self._calls, self._results = world, calls, results
        self._future: WaitingFuture | None = None
        for call in calls:
            call.work = weakref.ref(self)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Let other ranks run until all calls are complete."""
        for call in self._calls:
            if timeout:
                call.limit_s = timeout.total_seconds()
            self._world.wait_again(call)
        return self._finish()

    def _finish(self) -> bool:
        for call in self._calls:
            self._world.wait(call)
        if self._future is not None:
            self._future.settle()
        return True

    def synchronize(self) -> None:
        self._finish()

    def is_completed(self) -> bool:
        """Return True if all calls are complete. Lets other ranks run first."""
        return all(self._world.look(call) for call in self._calls)

    def is_success(self) -> bool:
        """Return `is_completed()`. (A call that cannot match ends the world.)"""
        return self.is_completed()

    def exception(self) -> Any:
        """Return None; see `is_success`."""
        return None

    def result(self) -> Any:
        self._finish()
        return self._results

    def source_rank(self) -> int:
        """Return the group rank that sent the received message."""
        return self._calls[0].source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the result. It completes once code waits for it or polls it.

        If torch waits for the future in C++, no rank can yield, so the future must complete before
        that. Within backward, it completes in a callback at the end of backward, which runs before
        DDP's own callback. Within such a callback, and in the rest of DDP, it completes
        immediately.
        """
        if self._future is None:
            self._future = WaitingFuture([self], self._results)
            if compat.is_in_backward():
                compat.after_backward(self._finish)
            elif _torch_may_wait():
                self._finish()
        return self._future


def _torch_may_wait() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in compat.WAIT_FOR_FUTURES:
        frame = frame.f_back
    return frame is not None


class WaitingFuture(torch.futures.Future[Any]):
    """A future whose `wait` lets the other ranks run. It completes when all of `works` have
    completed.
    """

    def __init__(self, works: Sequence[SimulatedWork], value: Any = None) -> None:
        super().__init__()
        self._works, self._value, self._settled = works, value, False

    def settle(self) -> None:
        if not self._settled:
            self._settled = True
            self.set_result(self._value)

    def finish(self) -> None:
        """Wait for `works`, which set the future's value."""
        for work in self._works:
            work._finish()

    def wait(self) -> Any:
        """Return the future's value, or raise the error of a callback."""
        self.finish()
        return super().wait()

    def done(self) -> bool:
        """Return True if the future is complete. Lets other ranks run first."""
        if not super().done() and all(work.is_completed() for work in self._works):
            self.finish()
        return super().done()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Return a future of the result of `callback`, which is called with this future."""
        chained = WaitingFuture(self._works)
        chained._complete_after(self, lambda: callback(self))
        return chained

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Register `callback`, which is called with this future. Except within backward, the future
        completes at once, because code may wait for the callback by other means.
        """
        super().add_done_callback(callback)
        if not compat.is_in_backward():
            self.finish()

    def _complete_after(self, future: Any, value: Callable[[], Any]) -> None:
        """When `future` completes, set this future to the result of `value()`, or to the error that
        it raises.
        """

        def run(_: Any) -> None:
            try:
                self._value = value()
            except Exception as error:
                self._settled = True
                self.set_exception(error)
            else:
                self.settle()

        compat.BaseFuture.add_done_callback(future, run)


@cache
def finish_before_torch_waits() -> None:
    """Let other ranks run before C++ code waits for several futures. Cannot be undone."""

    def with_collect(collect: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
        def collect_all(futures: Sequence[Any]) -> Any:
            collected = collect(futures)
            waiting = [future for future in futures if isinstance(future, WaitingFuture)]
            if not waiting:
                return collected
            found = WaitingFuture([work for future in waiting for work in future._works])
            found._complete_after(collected, collected.value)
            return found

        return collect_all

    compat.COLLECT_FUTURES.replace(with_collect)
