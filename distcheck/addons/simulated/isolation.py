"""Gives each rank of a simulated world its own state, by swapping it whenever another rank runs.

Each process has its own copy of this state, but ranks in one process would share it:

 RNG state         of torch, Python and NumPy
 environment       `os.environ`; C code still reads the environment of the process
 settings          of Python and torch, and the groups of torch.distributed
 patches           attributes that code sets in modules and classes shared by all ranks: patches.py
 modules           of the code under test: every rank imports its own copy, so each rank has its
                   own global variables. Modules of Python, torch, distcheck and installed
                   packages are shared, and so are modules with compiled code.
 working directory once a rank has changed it
 streams           sys.stdout and sys.stderr
 job state         attributes that a job declares (`jobs.with_rank_state`)
"""

import _random
import copy
import ctypes
import importlib
import logging
import operator
import os
import random
import site
import sys
import sysconfig
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from types import ModuleType
from typing import Any, TextIO

import torch

from distcheck.addons.simulated.patches import Patches
from distcheck.machine import compat
from distcheck.worlds.jobs import PerRankAttributes

_Words = ctypes.c_uint32 * 625


@dataclass
class GeneratorStates:
    """RNG states of one rank. `numpy` is the complete state of NumPy's global generator, and
    `words` the state of its Mersenne Twister; both are None if NumPy is not imported.
    """

    torch: torch.Tensor
    python: Any
    numpy: Any = None
    words: bytes | None = None
    source: Any = None  # NumPy's bit generator, which code may replace


class Generators:
    """The global RNGs of this process."""

    def __init__(self) -> None:
        self._python = _words_of_python()
        self._numpy: memoryview | None = None
        self._source: Any = None
        self._kept = 1  # nonzero if NumPy may hold a cached normal number for the next draw

    def beginning(self) -> GeneratorStates:
        """Return the current states. They become the initial states of a rank."""
        found = GeneratorStates(torch.default_generator.get_state(), self._python_now())
        self._take_numpy(found)
        return found

    def take(self, own: GeneratorStates) -> None:
        own.torch = torch.default_generator.get_state()
        own.python = self._python_now()
        self._take_numpy(own)

    def give(self, own: GeneratorStates) -> None:
        """Restore the states of the rank that runs next. The states of the previous rank are
        already saved.
        """
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
        # Consuming a cached normal number does not change the words.
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
    """Return a view of the state of Python's Mersenne Twister; None if its address is unknown."""
    if _random.Random.__basicsize__ < object.__basicsize__ + ctypes.sizeof(_Words):
        return None
    _, words, _ = random.getstate()
    address = id(random._inst) + object.__basicsize__  # type: ignore[attr-defined]
    return _view(address, (words[-1], *words[:-1]))


def _words_of_numpy(numpy: Any, source: Any) -> memoryview | None:
    """Return a view of the state of NumPy's Mersenne Twister; None for another generator."""
    state = numpy.get_state(legacy=False)
    if state["bit_generator"] != "MT19937" or source is None:
        return None
    words = (*state["state"]["key"].tolist(), state["state"]["pos"])
    return _view(source.ctypes.state_address, words)


def _view(address: int, words: tuple[int, ...]) -> memoryview | None:
    """Return a view of the memory at an address if it contains exactly `words`; None otherwise."""
    if tuple(_Words.from_address(address)) != words:
        return None
    return memoryview((ctypes.c_ubyte * ctypes.sizeof(_Words)).from_address(address)).cast("B")


# Names in modules; names missing in the running version of Python or torch are skipped.
_NAMES: Mapping[str, Sequence[str]] = {
    "builtins": ("print", "input", "open", "__import__"),
    "logging": (
        "lastResort", "raiseExceptions", "_loggerClass", "_logRecordFactory",
        "_warnings_showwarning",
    ),
    "sys": (
        "argv", "path", "path_hooks", "meta_path", "excepthook", "displayhook", "stdin",
    ),
    "tempfile": ("tempdir",),
    "warnings": ("filters", "onceregistry", "defaultaction", "showwarning", "formatwarning"),
    **compat.PROCESS_WIDE,
}  # fmt: skip


class ProcessSettings:
    """The settings of this process. A saved value is valid in this process only."""

    def __init__(self) -> None:
        self._modules = []
        for module, names in _NAMES.items():
            there = vars(sys.modules[module]) if module in sys.modules else {}
            if known := [name for name in names if name in there]:
                self._modules.append((there, known, operator.itemgetter(*known, known[0])))
        self._objects: list[Any] = [
            compat.groups_state(),
            logging.root,
            logging.root.manager,
            compat.print_options(),
        ]
        self._of_torch = compat.process_settings()
        self._now = self._torch_now()

    def beginning(self) -> Any:
        names = [
            [_copy_for_rank(module[name]) for name in names] for module, names, _ in self._modules
        ]
        others = [{n: _copy_for_rank(v) for n, v in vars(one).items()} for one in self._objects[1:]]
        return names, [compat.fresh_groups_state(), *others], self._torch_now()

    def take(self) -> Any:
        self._now = self._torch_now()
        values = [_values(module, names, get) for module, names, get in self._modules]
        return values, [one.__dict__ for one in self._objects], self._now

    def give(self, own: Any) -> None:
        """Restore the settings of the rank that runs next. The settings of the previous rank are
        already saved.
        """
        values, objects, of_torch = own
        before = warnings.filters
        for (module, names, _), these in zip(self._modules, values, strict=True):
            module.update(zip(names, these, strict=False))
        for one, state in zip(self._objects, objects, strict=True):
            one.__dict__ = state
        if before != warnings.filters and (changed := getattr(warnings, "_filters_mutated", None)):
            changed()  # otherwise a line that has warned once stays silent
        if of_torch != self._now:
            for (_, put), value, is_now in zip(self._of_torch, of_torch, self._now, strict=True):
                if value is not None and value != is_now:
                    put(value)

    def _torch_now(self) -> list[Any]:
        try:
            return [get() for get, _ in self._of_torch]
        except RuntimeError:  # code has set torch's two interfaces to one setting differently
            return [_or_nothing(get) for get, _ in self._of_torch]


def _values(
    module: Mapping[str, Any], names: Sequence[str], get: Callable[[Any], tuple[Any, ...]]
) -> Sequence[Any]:
    try:
        return get(module)
    except KeyError:  # code has deleted one
        return [module.get(name) for name in names]


def _or_nothing(get: Callable[[], Any]) -> Any:
    with suppress(RuntimeError):
        return get()
    return None


def _copy_for_rank(value: Any) -> Any:
    """Return a copy of a container for a rank. Any other value is returned unchanged."""
    return copy.copy(value) if isinstance(value, dict | list | set) else value


_COMPILED = (".so", ".pyd")
_NOTHING = PerRankAttributes()


@dataclass
class RankState:
    """The state of one rank."""

    numbers: GeneratorStates
    settings: Any
    patches: Sequence[Any]
    environment: Any
    streams: tuple[TextIO, TextIO]
    folder: str
    module_locks: dict[str, Any]
    attributes: Sequence[Any]
    modules: dict[str, ModuleType] = field(default_factory=dict)


class Isolation:
    """Swaps the state of ranks. Each rank begins with the current state of this process, with its
    entry of `environments`, and with the initial values of the attributes that `owned` lists.
    """

    def __init__(
        self,
        environments: Sequence[Mapping[str, str]],
        streams: Sequence[tuple[TextIO, TextIO]],
        owned: PerRankAttributes = _NOTHING,
    ) -> None:
        self._generators = Generators()
        self._owned = owned
        self._locks: Any = importlib._bootstrap  # type: ignore[attr-defined]
        _audit_chdir()
        _folders.differ = False
        self._shared = _shared_folders()
        self._known_files: dict[str, bool] = {}  # True if a file's module is per rank
        self._settings = ProcessSettings()
        self._patches = Patches(self._is_per_rank, _libraries())
        self._first = frozenset(sys.modules)  # shared by all ranks
        self._latest = next(reversed(sys.modules))
        self._copy_for_rank = [
            self._beginning(dict(variables), own, owned.begin())
            for variables, own in zip(environments, streams, strict=True)
        ]
        self._before = self._beginning({}, (sys.stdout, sys.stderr), owned.read())
        environ: Any = os.environ
        self._before.environment = environ._data
        self._before.module_locks = self._locks._module_locks

    def begin(self, rank: int) -> None:
        """Set the state of this process to that of the first rank that runs."""
        self._restore_state(self._copy_for_rank[rank])

    def switch(self, before: int, after: int) -> None:
        self._save_state(self._copy_for_rank[before])
        self._restore_state(self._copy_for_rank[after])

    def end(self) -> None:
        """Restore the state that this process had before its first rank ran."""
        self._take_modules({})
        self._settings.take()
        self._restore_state(self._before)
        self._patches.end()

    def _beginning(
        self,
        variables: dict[str, str],
        streams: tuple[TextIO, TextIO],
        attributes: Sequence[Any],
    ) -> RankState:
        environ: Any = os.environ
        data = {environ.encodekey(k): environ.encodevalue(v) for k, v in variables.items()}
        return RankState(
            numbers=self._generators.beginning(),
            settings=self._settings.beginning(),
            patches=(),
            environment=data,
            streams=streams,
            folder=os.getcwd(),
            module_locks={},
            attributes=attributes,
        )

    def _save_state(self, own: RankState) -> None:
        self._generators.take(own.numbers)
        own.settings = self._settings.take()
        own.patches = self._patches.take()
        own.streams = (sys.stdout, sys.stderr)
        own.modules = self._take_modules(own.modules)
        own.attributes = self._owned.read()
        if _folders.differ:
            own.folder = os.getcwd()

    def _restore_state(self, own: RankState) -> None:
        self._generators.give(own.numbers)
        environ: Any = os.environ
        environ._data = own.environment
        self._settings.give(own.settings)
        self._patches.give(own.patches)
        sys.stdout, sys.stderr = own.streams
        sys.modules.update(own.modules)
        for name, module in own.modules.items():
            if (parent := self._shared_parent(name, own.modules)) is not None:
                setattr(parent, name.rpartition(".")[2], module)
        self._locks._module_locks = own.module_locks
        self._owned.write(own.attributes)
        if _folders.differ:
            os.chdir(own.folder)

    def _take_modules(self, known: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
        """Remove the modules of the code under test from `sys.modules` and return them. They come
        after the latest shared module; if code has removed that module, all modules are examined.
        """
        names = list(takewhile(lambda name: name != self._latest, reversed(sys.modules)))
        if not names:
            return {}
        theirs = [
            name
            for name in reversed(names)
            if name in known or (name not in self._first and self._is_per_rank(sys.modules[name]))
        ]
        taken = {name: sys.modules.pop(name) for name in theirs}
        self._latest = next(reversed(sys.modules))
        for name in taken:
            if (parent := self._shared_parent(name, taken)) is not None:
                vars(parent).pop(name.rpartition(".")[2], None)
        return taken

    @staticmethod
    def _shared_parent(name: str, own: Mapping[str, ModuleType]) -> ModuleType | None:
        """Return the package that contains a per-rank module, if all ranks share the package. The
        package must not keep the module as an attribute.
        """
        parent = name.rpartition(".")[0]
        return None if not parent or parent in own else sys.modules.get(parent)

    def _is_per_rank(self, module: ModuleType | None) -> bool:
        """Return True if a module belongs to the code under test, so that each rank has its own
        copy.
        """
        file = _file_of(module)
        if file is None:
            return self._is_made_by_code(module)
        known = self._known_files.get(file)
        if known is None:
            known = self._known_files[file] = _is_theirs(file, self._shared)
        return known

    def _is_made_by_code(self, module: ModuleType | None) -> bool:
        """Return True if code has created a module: it has neither a file nor a loader, and is not
        part of a shared package, which would have created it for all ranks.
        """
        if type(module) is not ModuleType or module.__spec__ is not None:
            return False
        package = sys.modules.get(module.__name__.partition(".")[0])
        shared = package is not None and package is not module and not self._is_per_rank(package)
        return not shared and not module.__name__.startswith("_")


@cache
def is_rank_code(file: str) -> bool:
    return _is_theirs(file, _shared_folders())


def code_under_test() -> list[ModuleType]:
    """Return the modules of the code under test that are imported in this process."""
    shared, found = _shared_folders(), []
    for module in list(sys.modules.values()):
        file = _file_of(module)
        if file is not None and _is_theirs(file, shared):
            found.append(module)
    return found


def _file_of(module: ModuleType | None) -> str | None:
    """Return the file of a module, or the folder of a namespace package."""
    file = getattr(module, "__file__", None)
    if file is None:  # a folder without __init__.py, or a builtin module
        file = next(iter(getattr(module, "__path__", ())), None)
    return file if isinstance(file, str) else None


def _is_theirs(file: str, shared: tuple[str, ...]) -> bool:
    if not os.path.isabs(file):  # for example torch.ops
        return False
    return not file.endswith(_COMPILED) and not os.path.normpath(file).startswith(shared)


class _Folders:
    """Records whether any rank of the running world has changed its working directory."""

    differ = False


_folders = _Folders()


@cache
def _audit_chdir() -> None:
    def hear(event: str, _: tuple[Any, ...]) -> None:
        if event == "os.chdir":
            _folders.differ = True

    sys.addaudithook(hear)


def _shared_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(_folder(folder) for folder in folders) + _libraries()


def _libraries() -> tuple[str, ...]:
    """Return the folders of distcheck, torch and their dependencies. The state of modules in them
    is shared.
    """
    loaded = [sys.modules.get(name) for name in ("numpy", "msgspec")]
    files = [__file__.rpartition("addons")[0], torch.__file__, *(m.__file__ for m in loaded if m)]
    return tuple(_folder(os.path.dirname(file or "")) for file in files)


def _folder(path: str) -> str:
    return os.path.join(os.path.abspath(path), "")
