"""One set of settings: options of `verify`, keys of the configuration, the signature of
`distcheck.verify`, the fields of a request and those of a case have the same names and defaults; so
have the promises of `@strategy` and the fields of a contract.
"""

import inspect
import re
import shlex
from typing import Any, get_type_hints

import click
import msgspec
import pytest

import distcheck
from distcheck.cli.commands.verify import command
from distcheck.contract import Contract
from distcheck.plan.configuration import TAKES, OfAll, OfStrategy
from distcheck.plan.settings import CALLS, DEFAULTS, SETTINGS, KeywordSettings, Request
from distcheck.records import Case
from distcheck.reports.files import output_names

# Not of what is compared: where it runs, what is shown and written, and how it is shared out.
OF_THE_COMMAND = {
    "config", "shard", "save", "digests", "verbose", "quiet", "nnodes", "machine",
    "master_addr", "master_port", "init_method", "download", "last_failed", "failed_first",
    "watch", "on", *output_names(),
}  # fmt: skip
MADE_FROM_OTHERS = {"adaptation", "ranks_here", "cell_worlds", "delays"}

OPTIONS = {option.name: option for option in command.params if isinstance(option, click.Option)}
FIELDS = {field.name: field for field in msgspec.structs.fields(Request)}
PYTHON = inspect.signature(distcheck.verify).parameters


def test_every_option_and_field_is_a_setting() -> None:
    assert set(OPTIONS) == SETTINGS.keys() | OF_THE_COMMAND
    assert set(FIELDS) == (SETTINGS.keys() - CALLS.keys()) | MADE_FROM_OTHERS
    names = {setting.parameter for setting in SETTINGS.values()}
    assert set(PYTHON) == names | {"delays", "save"}
    assert get_type_hints(KeywordSettings).keys() == names - {"strategy"}
    keys = {field.encode_name for field in msgspec.structs.fields(OfAll)}
    assert keys == set(TAKES) == {setting.key for setting in SETTINGS.values()} | {"strategy"}
    of_all = {setting.key for setting in SETTINGS.values() if setting.of_all} | {"strategy"}
    assert {field.encode_name for field in msgspec.structs.fields(OfStrategy)} == keys - of_all


@pytest.mark.parametrize("name", SETTINGS)
def test_names_defaults_and_help_are_the_same_everywhere(name: str) -> None:
    setting, option = SETTINGS[name], OPTIONS[name]
    assert setting.option in option.opts
    assert setting.help in (option.help or "")
    assert setting.takes == TAKES[setting.key]
    if name in FIELDS:
        assert FIELDS[name].default == DEFAULTS[name]
    if name != "strategies":
        assert PYTHON[setting.parameter].default == DEFAULTS[name]
    if name != "worlds":  # none given is 4, or what --thorough takes
        assert default_of(option) == DEFAULTS[name]


def default_of(option: click.Option) -> Any:
    """An option's, as a request has it."""
    value = option.get_default(click.Context(command))
    if value is getattr(click.core, "UNSET", None):  # since click 8.3, where none was declared
        value = None
    return tuple(value or ()) if option.multiple else value


def test_python_refuses_what_is_no_setting() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'step' \(did you mean steps"):
        distcheck.verify("allreduce", step=3)  # type: ignore[call-arg]


# Of a case alone: a request has several, or it follows from them.
OF_A_CASE = {
    "id", "strategy", "world", "workload", "steps", "dtype", "layers", "rerun", "initial",
    "reference_device", "left_out", "job",
}  # fmt: skip


def test_a_case_has_the_defaults_of_a_request() -> None:
    fields = {field.name: field.default for field in msgspec.structs.fields(Case)}
    shared = fields.keys() - OF_A_CASE
    assert shared <= FIELDS.keys(), "what a case says, a request can ask for"
    assert {n: fields[n] for n in shared} == {n: FIELDS[n].default for n in shared}


def test_promises_are_the_fields_of_a_contract() -> None:
    fields = {field.name: field.default for field in msgspec.structs.fields(Contract)}
    promises = inspect.signature(distcheck.strategy).parameters
    defaults = {name: promise.default for name, promise in promises.items()}
    assert defaults.pop("parallel") is None  # a mapping, of which the contract holds the items
    assert defaults == {name: value for name, value in fields.items() if name != "parallel"}
    assert fields["parallel"] == ()
    described = re.findall(r"^(\w+)  ", inspect.getdoc(Contract) or "", re.MULTILINE)
    assert sorted(described) == sorted(fields), "a line for each in the docstring"
    with pytest.raises(ValueError, match="@strategy") as refused:
        distcheck.strategy(micro_batches=0)
    assert all(name in str(refused.value) for name in fields)


OTHER = {
    "dtype": "float64", "steps": 7, "batch": 70, "data": "mnist", "data_dir": "there", "seed": 5,
    "backend": "simulated", "device": "cuda", "separate": False, "schedules": 3, "preemptions": 2,
    "schedule": "first-ready", "loss": "sum/global", "accept": "quantized:8",
}  # fmt: skip
HOW_LONG = {"deadline_s"}  # it changes when a case is given up, and not what it is


def test_what_a_case_keeps_of_a_setting_is_in_its_replay_line() -> None:
    """Else a replay without the case file would run something else, without a word."""
    of_case = SETTINGS.keys() & {field.name for field in msgspec.structs.fields(Case)}
    assert of_case - HOW_LONG == OTHER.keys()
    for name, value in OTHER.items():
        case = msgspec.structs.replace(Case(id="", strategy="s", world=2), **{name: value})
        option = SETTINGS[name].option
        option = option.replace("--", "--no-", 1) if value is False else option
        words = shlex.split(case.command_line)
        assert option in words, name
        assert value is False or words[words.index(option) + 1] == str(value), name
