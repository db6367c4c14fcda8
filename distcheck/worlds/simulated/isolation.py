"""What the ranks of one process would share, and ranks in processes do not: it is exchanged
whenever another rank runs.

    random numbers    of torch, Python and numpy
    environment       `os.environ`; what C code reads of it is the process's
    c10d              the groups that torch.distributed keeps in its module
    modules           those of the code under test: every rank imports its own, so that a global
                      variable in one is the rank's. Python's, torch's, distcheck's and what is
                      installed beside them are shared, and so are modules with compiled code.
    working directory once a rank has changed it
    streams           sys.stdout and sys.stderr
    default dtype     of torch
    what a job says   attributes that `owned.py` names
"""

import importlib
import os
import random
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import torch
import torch.distributed.distributed_c10d as c10d

from distcheck.worlds.simulated.owned import Owned

# What torch.distributed keeps beside its `_world`; releases differ.
_C10D_NAMES = (
    "_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_group_count", "_tags_to_pg",
    "_pg_to_tag", "_default_pg_init_method",
)  # fmt: skip
_COMPILED = (".so", ".pyd")
_NOTHING = Owned()


@dataclass
class Own:
    """What one rank has of its own."""

    torch_random: torch.Tensor
    python_random: Any
    numpy_random: Any
    environment: Any
    c10d_values: dict[str, Any]
    c10d_world: dict[str, Any]
    streams: tuple[TextIO, TextIO]
    folder: str
    dtype: torch.dtype
    module_locks: dict[str, Any]
    attributes: Sequence[Any]
    modules: dict[str, ModuleType] = field(default_factory=dict)


class Isolation:
    """Exchanges what is a rank's own. All ranks begin with what this process has now, and with
    `environments`, one for each; of what the job has `owned`, with its first values.
    """

    def __init__(
        self,
        environments: Sequence[Mapping[str, str]],
        streams: Sequence[tuple[TextIO, TextIO]],
        owned: Owned = _NOTHING,
    ) -> None:
        self._owned = owned
        self._locks: Any = importlib._bootstrap  # type: ignore[attr-defined]
        _hear_of_folders()
        _folders.differ = False
        self._shared = _shared_folders()
        self._c10d = {name: vars(c10d)[name] for name in _C10D_NAMES if hasattr(c10d, name)}
        self._counted = len(sys.modules)
        self._own = [
            self._beginning(dict(variables), own, owned.begin())
            for variables, own in zip(environments, streams, strict=True)
        ]
        self._before = self._beginning({}, (sys.stdout, sys.stderr), owned.read())
        environ: Any = os.environ
        self._before.environment = environ._data
        self._before.module_locks = self._locks._module_locks

    def begin(self, rank: int) -> None:
        """Gives this process to the first rank that runs."""
        self._enter(self._own[rank])

    def switch(self, before: int, after: int) -> None:
        """Takes what the one rank has, and gives the other what it had."""
        self._leave(self._own[before])
        self._enter(self._own[after])

    def end(self) -> None:
        """Gives this process back what it had before its first rank ran, after the last one."""
        self._take_modules()
        self._enter(self._before)

    def _beginning(
        self,
        variables: dict[str, str],
        streams: tuple[TextIO, TextIO],
        attributes: Sequence[Any],
    ) -> Own:
        environ: Any = os.environ
        data = {environ.encodekey(k): environ.encodevalue(v) for k, v in variables.items()}
        return Own(
            torch_random=torch.default_generator.get_state(),
            python_random=random.getstate(),
            numpy_random=_numpy_state(),
            environment=data,
            c10d_values={k: v.copy() if isinstance(v, dict) else v for k, v in self._c10d.items()},
            c10d_world=vars(c10d._World()).copy(),
            streams=streams,
            folder=os.getcwd(),
            dtype=torch.get_default_dtype(),
            module_locks={},
            attributes=attributes,
        )

    def _leave(self, own: Own) -> None:
        own.torch_random = torch.default_generator.get_state()
        own.python_random = random.getstate()
        own.numpy_random = _numpy_state()
        for name in self._c10d:
            own.c10d_values[name] = vars(c10d)[name]
        own.streams = (sys.stdout, sys.stderr)
        own.dtype = torch.get_default_dtype()
        own.modules = self._take_modules()
        own.attributes = self._owned.read()
        if _folders.differ:
            own.folder = os.getcwd()

    def _enter(self, own: Own) -> None:
        torch.default_generator.set_state(own.torch_random)
        random.setstate(own.python_random)
        if own.numpy_random is not None:
            sys.modules["numpy.random"].set_state(own.numpy_random)
        environ: Any = os.environ
        environ._data = own.environment
        vars(c10d).update(own.c10d_values)
        c10d._world.__dict__ = own.c10d_world
        sys.stdout, sys.stderr = own.streams
        if own.dtype != torch.get_default_dtype():
            torch.set_default_dtype(own.dtype)
        sys.modules.update(own.modules)
        for name, module in own.modules.items():
            if (parent := self._shared_parent(name, own.modules)) is not None:
                setattr(parent, name.rpartition(".")[2], module)
        self._locks._module_locks = own.module_locks
        self._owned.write(own.attributes)
        if _folders.differ:
            os.chdir(own.folder)

    def _take_modules(self) -> dict[str, ModuleType]:
        """Those of the code under test, which come last; further ones that all share are counted
        among the first from now on.
        """
        count = len(sys.modules) - self._counted
        if count == 0:
            return {}
        names = list(islice(reversed(sys.modules), count if count > 0 else None))
        theirs = [name for name in reversed(names) if self._is_own(sys.modules[name])]
        taken = {name: sys.modules.pop(name) for name in theirs}
        self._counted = len(sys.modules)
        for name in taken:
            if (parent := self._shared_parent(name, taken)) is not None:
                vars(parent).pop(name.rpartition(".")[2], None)
        return taken

    @staticmethod
    def _shared_parent(name: str, own: Mapping[str, ModuleType]) -> ModuleType | None:
        """The package of one of the ranks' modules, if all ranks share it: the module must not be
        found through it.
        """
        parent = name.rpartition(".")[0]
        return None if not parent or parent in own else sys.modules.get(parent)

    def _is_own(self, module: ModuleType | None) -> bool:
        return _is_theirs(module, self._shared)


def code_under_test() -> list[ModuleType]:
    """The modules of the code under test that this process has imported."""
    shared = _shared_folders()
    return [module for module in list(sys.modules.values()) if _is_theirs(module, shared)]


def _is_theirs(module: ModuleType | None, shared: tuple[str, ...]) -> bool:
    """Whether a module is of the code under test, and so each rank's own."""
    file = getattr(module, "__file__", None)
    if file is None:  # a folder without __init__.py, or built in
        file = next(iter(getattr(module, "__path__", ())), None)
    if not isinstance(file, str) or file.endswith(_COMPILED):
        return False
    return not os.path.abspath(file).startswith(shared)


class _Folders:
    """Whether a rank of the world that runs has changed its working directory."""

    differ = False


_folders = _Folders()


@cache
def _hear_of_folders() -> None:
    def hear(event: str, _: tuple[Any, ...]) -> None:
        if event == "os.chdir":
            _folders.differ = True

    sys.addaudithook(hear)


def _numpy_state() -> Any:
    numpy: Any = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state(legacy=False)


def _shared_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    folders |= {str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)}
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)
