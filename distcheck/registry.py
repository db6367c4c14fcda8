"""Registry of the add-ons: the parts of distcheck that everything else works without.

The core imports no add-on. It reaches one through `load`, by its name in `ADDONS`; a backend or a
command of an add-on is found by `BACKENDS` and `COMMANDS`. After the folder of an add-on has been
removed, a request that needs it ends in one sentence and exit code 2, and nothing else changes.

An add-on is a package below `distcheck.addons` whose `__init__` offers what the core calls. One
with a backend is the backend's module as well (see `distcheck/backends/__init__.py`); a command is
the object `command` of the module that `COMMANDS` names. To add one, create its folder and add a
line here.
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
