"""Registry of the add-ons: the parts of distcheck that everything else works without.

The core does not import add-ons. It loads one with `load`, by its name in `ADDONS`; `BACKENDS` and
`COMMANDS` list the backends and commands of add-ons. If the folder of an add-on is removed, a
request that needs it ends with one sentence and exit code 2, and nothing else changes.

An add-on is a package below `distcheck.addons` whose `__init__` defines the functions that the core
calls. If it has a backend, it is also the backend's module (see `distcheck/backends/__init__.py`);
a command is the object `command` of the module that `COMMANDS` names. To add one, create its folder
and add a line here.
"""

import functools
import importlib
import importlib.util
from types import ModuleType

from distcheck.errors import UsageError

# The features that need an add-on.
ADDONS = {
    "backend_probe": "distcheck backends",
    "engines": "verify --on",
    "explore": "distcheck explore and the search of --thorough",
    "mpi": "backend mpi",
    "selftest": "distcheck selftest",
    "simulated": "backend simulated, its schedules, and distcheck scale",
}
BACKENDS = ("mpi", "simulated")  # backends, of the add-on of the same name
COMMANDS = {
    "backends": "backend_probe.command",
    "explore": "explore.explore_command",
    "scale": "simulated.scale_command",
    "selftest": "selftest.command",
}


@functools.cache
def is_installed(name: str) -> bool:
    """Return True if the package of an add-on can be found; imports nothing of it."""
    try:
        return importlib.util.find_spec(f"distcheck.addons.{name}") is not None
    except ModuleNotFoundError:  # the folder of all add-ons
        return False


def load(name: str) -> ModuleType:
    """Return the package of an add-on. Raises UsageError if it is not installed."""
    if not is_installed(name):
        raise UsageError(
            f"the add-on {name!r} ({ADDONS[name]}) is not installed; reinstall distcheck: "
            "pip install --force-reinstall distcheck"
        )
    return importlib.import_module(f"distcheck.addons.{name}")


def command_module(command: str) -> str:
    """Return the module of an add-on's command. Raises UsageError if it is not installed."""
    load(COMMANDS[command].partition(".")[0])
    return f"distcheck.addons.{COMMANDS[command]}"
