"""Options that several commands share, and shell completion of their values. Imports nothing
expensive, because shell completion imports this module at every press of Tab.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from distcheck.errors import UsageError
from distcheck.plan.settings import CALLS, DEFAULTS, SETTINGS


def completing(names: Callable[[], Iterable[str]], *, files: bool = False) -> dict[str, Any]:
    """Return the keyword argument with which a click option completes to `names`, and to files with
    `files`. Names that need quoting in a shell (a folder `;command`) are not proposed.
    """

    def complete(
        context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> Sequence[CompletionItem]:
        found = [
            CompletionItem(name)
            for name in names()
            if name.startswith(incomplete) and shlex.quote(name) == name
        ]
        return found or ([CompletionItem(incomplete, type="file")] if files else [])

    return {"shell_complete": complete}


def _saved_runs() -> Iterable[str]:
    from distcheck.store.run_folder import stored_runs

    return [str(folder) for folder in stored_runs()]


RUNS = completing(_saved_runs, files=True)

F = TypeVar("F", bound=Callable[..., Any])


def json_option(what: str) -> Callable[[F], F]:
    """Return the option that writes the results of a command to a JSON file."""
    return click.option(
        "--json",
        "json_file",
        metavar="FILE",
        type=click.Path(dir_okay=False),
        help=f"Write the {what} as JSON; - for standard output.",
    )


def trust_option(command: F) -> F:
    """Add the option `--trust`, for commands that run code named by a file or folder."""
    return click.option("--trust", is_flag=True, help="Run untrusted code without asking.")(command)


_TIME = "TIME"


class Seconds(click.ParamType[float]):
    """A duration in seconds: 30, 30s, 500ms, 5m, 1h."""

    name = "time"
    _UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}  # noqa: RUF012

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"(-?[0-9.]+(?:e-?[0-9]+)?)\s*([a-z]*)", value.strip().lower())
        number, unit = found.groups() if found else (value.strip().lower(), "")
        try:
            return float(number) * self._UNITS[unit or "s"]
        except (ValueError, KeyError):
            self.fail(
                f"{value!r} is not a duration; pass seconds, or 30s, 500ms, 5m, 1h", param, ctx
            )


SECONDS = Seconds()


class _WholeNumber(click.types.IntParamType):
    """Integer parameter. If the option is repeatable, the error message says so."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(value)
        except ValueError:
            said = f"{value!r} is not an integer{self._hint_to_repeat(str(value), param)}"
            self.fail(said, param, ctx)

    @staticmethod
    def _hint_to_repeat(value: str, param: click.Parameter | None) -> str:
        several = re.findall(r"\d+", value)
        if len(several) < 2 or not isinstance(param, click.Option) or not param.multiple:
            return ""
        return "; repeat the option: " + " ".join(f"{param.opts[0]} {one}" for one in several)


_TYPES: dict[Any, Any] = {int: _WholeNumber()}


def setting_option(name: str, *, single: bool = False, **changed: Any) -> Callable[[F], F]:
    """Return the option for a setting that `plan/settings.py` declares, with the attributes in
    `changed` replaced. With `single`, a repeatable option may be given only once, and has its name
    from the Python API.
    """
    setting, default = SETTINGS[name], DEFAULTS[name]
    flag = setting.option
    if default is True:
        flag += f"/--no-{flag.removeprefix('--')}"
    said = setting.default or (setting.option if default is True else "")
    asked: dict[str, Any] = {
        "type": SECONDS if setting.metavar == _TIME else _TYPES.get(setting.type, setting.type),
        "metavar": setting.metavar,
        "help": f"{setting.help} [default: {said}]" if said else setting.help,
        **(completing(setting.names, files=setting.is_open) if setting.names else {}),
    }
    if isinstance(default, bool):
        asked["is_flag"] = True  # if this is False, click takes an option without a value
    if setting.repeated:
        asked["multiple"] = True
    else:
        asked |= {
            "default": default,
            "show_default": not said and default is not None and default is not False,
        }
    asked |= changed
    if single and setting.repeated:
        # Click silently takes the last of several; elsewhere each of them counts.
        asked |= {"multiple": True, "callback": _single_value}
        if "default" in changed:
            asked["default"] = [changed["default"]]
    if setting.metavar == _TIME:
        said = f"{asked['default']:g}s"
        asked |= {"show_default": False, "help": f"{setting.help} [default: {said}]"}
    return click.option(flag, setting.parameter if single else name, **asked)


def _single_value(ctx: click.Context, param: click.Parameter, values: tuple[Any, ...]) -> Any:
    """Return the value of an option that is repeatable in other commands; None if it is not given.
    Raises UsageError if it is given several times.
    """
    if len(set(values)) > 1:
        given = " and ".join(str(value) for value in values)
        raise UsageError(
            f"{param.opts[0]} was given {given}; distcheck {ctx.info_name} takes only one"
        )
    return values[-1] if values else None


def _combine_options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def setting_options(*names: str) -> Callable[[F], F]:
    return _combine_options(*map(setting_option, names or SETTINGS))


DOWNLOAD = click.option("--download", is_flag=True, help="Download the files if they are missing.")
# Calls of code that was not written for distcheck, and the rules for its numbers.
CALL_OPTIONS = (*CALLS, "loss", "accept")


# The file of the matrix, and the selected part of it.
matrix_options = _combine_options(
    click.option("--config", metavar="FILE", type=click.Path(dir_okay=False),
                 help="File with the matrix. [default: pyproject.toml here or above, "
                     "tool.distcheck]"),
    click.option("--shard", metavar="I/N",
                 help="Run only part I of N of the cases; distcheck merge merges the reports."),
)  # fmt: skip


def given_options() -> frozenset[str]:
    """Return the parameters of the running command that were set on the command line."""
    context = click.get_current_context()
    usual = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
    return frozenset(n for n in context.params if context.get_parameter_source(n) not in usual)


# For ranks on several machines, without a launcher.
machine_options = _combine_options(
    click.option("--nnodes", "--num-nodes", type=int, metavar="N",
                 help="Number of machines that share the ranks. Start the same command on each."),
    click.option("--node-rank", "--rank", "machine", type=int, metavar="I",
                 help="Index of this machine, from 0."),
    click.option("--master-addr", "--master-ip", metavar="HOST",
                 help="Address of machine 0."),
    click.option("--master-port", type=int, metavar="PORT",
                 help="Free port on machine 0. [default: 29500]"),
    click.option("--init-method", metavar="URL",
                 help="Rendezvous: tcp://HOST:PORT or file:///PATH, instead of --master-addr and "
                     "--master-port."),
)  # fmt: skip
