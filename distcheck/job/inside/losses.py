"""The losses of torch's that a script computes, and which of them a backward pass comes from."""

import itertools
from typing import Any

from msgspec.structs import replace

from distcheck.job.inside import hooks
from distcheck.job.inside.terms import Heard
from distcheck.recordings.jobs.records import LossCall, Pass, Term

_numbers = itertools.count()


class LossesHeard:
    """Those since the last backward pass; since earlier ones, where some had none yet, as in a
    pipeline that makes several forward passes first.
    """

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self._calls: list[LossCall] = []
        self._places: dict[int, int] = {}  # in the lists, by number
        self._reached: set[int] = set()
        self._done: set[int] = set()

    def hear(self, name: str, reduction: str, counted: int, target: str, value: Any) -> None:
        """One was computed, over `counted` targets; hears of a backward pass through it."""
        heard = next(_numbers)
        self._places[heard] = len(self._calls)
        number = float(value.detach()) if value.numel() == 1 else float("nan")
        self._calls.append(
            LossCall(name=name, reduction=reduction, counted=counted, value=number, target=target)
        )
        self.heard.append((name, reduction, value, counted))
        value.grad_fn.register_prehook(lambda _: hooks.say("reaches", heard))

    def begin(self) -> None:
        """A backward pass begins."""
        self._reached = set()

    def reaches(self, heard: int) -> None:
        """It goes through one of them."""
        if heard in self._places:
            self._reached.add(self._places[heard])

    @property
    def is_over(self) -> bool:
        """Whether a backward pass went through each of them."""
        return len(self._done) == len(self._calls)

    def of_backward(self, one: Pass) -> tuple[tuple[LossCall, ...], tuple[Term, ...]]:
        """The losses that a pass's backward pass came from, and its terms, which say which."""
        kept = sorted(self._reached)
        self._done |= self._reached
        places = {place: number for number, place in enumerate(kept, len(one.losses))}
        terms = (replace(term, call=places.get(term.call, -1)) for term in one.terms)
        return (*one.losses, *(self._calls[place] for place in kept)), tuple(terms)
