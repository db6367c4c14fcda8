"""A started call: c10d's Work, and the future that torch chains to it."""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work  # type: ignore[attr-defined]

from distcheck.backends.simulated.calls import Call
from distcheck.backends.simulated.world import SimulatedWorld

_NO_LIMIT = timedelta(0)


class SimulatedWork(Work):
    """One call or several, which are waited for as one. Results are there once it was waited for,
    and not before: code that reads them too soon reads what it had given.
    """

    def __init__(
        self, world: SimulatedWorld, calls: Sequence[Call], results: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._world, self._calls, self._results = world, calls, results
        self._future: WaitingFuture | None = None
        for call in calls:
            call.work = weakref.ref(self)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Gives way to other ranks until all is complete."""
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
        """The same as `wait`."""
        self._finish()

    def is_completed(self) -> bool:
        """Whether all is complete; other ranks run first."""
        return all(self._world.look(call) for call in self._calls)

    def is_success(self) -> bool:
        """The same: a call that cannot match ends the world."""
        return self.is_completed()

    def exception(self) -> Any:
        """None: see `is_success`."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that it has written."""
        self._finish()
        return self._results

    def source_rank(self) -> int:
        """The group's rank that a received message came from."""
        return self._calls[0].source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future of the result.

        torch waits for it in C++, where no rank can give way. So it is complete before torch does:
        within backward by a callback at its end, which comes before DDP's own; at once elsewhere.
        """
        if self._future is None:
            self._future = WaitingFuture(self._finish, self._results)
            if torch._C._current_autograd_node() is None:  # type: ignore[attr-defined]
                self._finish()
            else:
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._at_end_of_backward)
        return self._future

    getFuture = get_future  # noqa: N815

    def _at_end_of_backward(self) -> None:
        self._finish()


class WaitingFuture(torch.futures.Future[Any]):
    """A future whose `wait` lets the other ranks run. `finish` makes its value known."""

    def __init__(self, finish: Callable[[], Any], value: Any = None) -> None:
        super().__init__()
        self._finish, self._value, self._settled = finish, value, False

    def settle(self) -> None:
        """Sets its value, once."""
        if not self._settled:
            self._settled = True
            self.set_result(self._value)

    def wait(self) -> Any:
        """Its value, or the error that a callback raised."""
        self._finish()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """A future of what `callback` returns when it is called with this one."""
        chained = WaitingFuture(self._finish)

        def run(_: Any) -> None:
            try:
                chained._value = callback(self)
            except Exception as error:
                chained._settled = True
                chained.set_exception(error)
            else:
                chained.settle()

        self.add_done_callback(run)
        return chained
