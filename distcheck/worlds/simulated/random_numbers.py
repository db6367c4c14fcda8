"""The generators that a process has one of each: torch's, Python's and NumPy's. Each rank of a
simulated world has its own state of them.

Ranks take turns tens of thousands of times in a run. So the state of a Mersenne twister is copied
as it lies in memory: 624 words and a position, which takes 1 us, where asking the libraries takes
80. What lies there is compared once with what the library says; where it is something else, the
library is asked each time.
"""

import _random
import ctypes
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

_Words = ctypes.c_uint32 * 625


@dataclass
class GeneratorStates:
    """The states of one rank. Of NumPy's, `numpy` is all of it and `words` its twister; both are
    None where NumPy is not there.
    """

    torch: torch.Tensor
    python: Any
    numpy: Any = None
    words: bytes | None = None
    source: Any = None  # NumPy's bit generator, which code may replace


class Generators:
    """Those of this process."""

    def __init__(self) -> None:
        self._python = _words_of_python()
        self._numpy: memoryview | None = None
        self._source: Any = None
        self._kept = 1  # whether NumPy now keeps a normal number for the next draw

    def beginning(self) -> GeneratorStates:
        """The states as they are now, for a rank to begin with."""
        found = GeneratorStates(torch.default_generator.get_state(), self._python_now())
        self._take_numpy(found)
        return found

    def take(self, own: GeneratorStates) -> None:
        """Notes the states of the rank that ran."""
        own.torch = torch.default_generator.get_state()
        own.python = self._python_now()
        self._take_numpy(own)

    def give(self, own: GeneratorStates) -> None:
        """Sets the states of the rank that runs now. Those of the last one have been taken."""
        torch.default_generator.set_state(own.torch)
        if self._python is None:
            random.setstate(own.python)
        else:
            self._python[:], random._inst.gauss_next = own.python  # type: ignore[attr-defined]
        if own.numpy is not None:
            self._give_numpy(own)

    def _python_now(self) -> Any:
        if self._python is None:
            return random.getstate()
        return bytes(self._python), random._inst.gauss_next  # type: ignore[attr-defined]

    def _take_numpy(self, own: GeneratorStates) -> None:
        if (numpy := sys.modules.get("numpy.random")) is None:
            return
        source = _source_of(numpy)
        if self._source is None or source is not self._source:
            self._source, self._numpy = source, _words_of_numpy(numpy, source)
        words = None if self._numpy is None else bytes(self._numpy)
        # A normal number that is kept for the next draw can go without a trace in the words.
        same = words is not None and words == own.words and source is own.source
        if not same or own.numpy["has_gauss"]:
            own.numpy, own.words, own.source = numpy.get_state(legacy=False), words, source
        self._kept = own.numpy.get("has_gauss", 1)

    def _give_numpy(self, own: GeneratorStates) -> None:
        numpy: Any = sys.modules["numpy.random"]
        if own.source is not _source_of(numpy):
            numpy.set_bit_generator(own.source)
            numpy.set_state(own.numpy)
        elif self._numpy is not None and own.words and not (self._kept or own.numpy["has_gauss"]):
            self._numpy[:] = own.words
        else:
            numpy.set_state(own.numpy)


def _source_of(numpy: Any) -> Any:
    return getattr(numpy.mtrand._rand, "_bit_generator", None)


def _words_of_python() -> memoryview | None:
    """Where Python's twister lies; None where that is not known."""
    if _random.Random.__basicsize__ < object.__basicsize__ + ctypes.sizeof(_Words):
        return None
    _, words, _ = random.getstate()
    address = id(random._inst) + object.__basicsize__  # type: ignore[attr-defined]
    return _view(address, (words[-1], *words[:-1]))


def _words_of_numpy(numpy: Any, source: Any) -> memoryview | None:
    """Where NumPy's twister lies; None where that is not known, or it is another generator."""
    state = numpy.get_state(legacy=False)
    if state["bit_generator"] != "MT19937" or source is None:
        return None
    words = (*state["state"]["key"].tolist(), state["state"]["pos"])
    return _view(source.ctypes.state_address, words)


def _view(address: int, words: tuple[int, ...]) -> memoryview | None:
    """The bytes at an address, if they are these words."""
    if tuple(_Words.from_address(address)) != words:
        return None
    return memoryview((ctypes.c_ubyte * ctypes.sizeof(_Words)).from_address(address)).cast("B")
