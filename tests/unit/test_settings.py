"""One set of settings: options of `verify`, keys of the configuration, the signature of
`distcheck.verify`, the fields of a request and those of a case have the same names and defaults; so
have the promises of `@strategy` and the fields of a contract.
"""

import inspect
import re
from typing import Any

import click
import msgspec
import pytest

import distcheck
from distcheck.cli.commands.verify import command
from distcheck.contract import Contract
from distcheck.plan.cases import Request
from distcheck.plan.configuration import PARAMETERS, TAKES, OfAll
from distcheck.plan.settings import SETTINGS
from distcheck.records import Case

# Where a name differs, by the name of the option's parameter.
IN_PYTHON = {"strategies": "strategy", "worlds": "world", "workloads": "workload"}
OF_ADAPTATION = {"form", "arguments", "variables", "finish", "reset", "without_data"}
# Not of what is compared: where it runs, what is shown and written, and how it is shared out.
OF_THE_COMMAND = {
    "config", "shard", "save", "digests", "verbose", "quiet", "delay", "nnodes", "machine",
    "master_addr", "master_port", "init_method", "output_files", "download",
}  # fmt: skip
MADE_FROM_OTHERS = {"adaptation", "ranks_here", "cell_worlds", "delays"}

OPTIONS = {option.name: option for option in command.params if isinstance(option, click.Option)}
FIELDS = {field.name: field for field in msgspec.structs.fields(Request)}
PYTHON = inspect.signature(distcheck.verify).parameters


def settings() -> set[str]:
    """The options that say what is compared."""
    files = {name for name in OPTIONS if name in ("json_file", "html_file", "junit_file", "github")}
    return (
        {str(name) for name in OPTIONS} - OF_THE_COMMAND - files - {"help", "json", "html", "junit"}
    )


def default_of(name: str) -> Any:
    """An option's, as a request has it."""
    option = OPTIONS[name]
    value = option.get_default(click.Context(command))
    if value is getattr(click.core, "UNSET", None):  # since click 8.3, where none was declared
        value = None
    return tuple(value or ()) if option.multiple else value


def test_every_option_is_a_field_of_the_request() -> None:
    assert settings() - OF_ADAPTATION <= set(FIELDS), "a field of Request for each option"
    derived = set(FIELDS) - settings() - {"download"}
    assert derived == MADE_FROM_OTHERS, "an option of verify for each field of Request"


def test_every_option_is_a_key_of_the_configuration() -> None:
    assert set(PARAMETERS.values()) == settings(), "a key of the configuration for each option"
    keys = {field.encode_name for field in msgspec.structs.fields(OfAll)}
    assert keys == set(TAKES) == set(PARAMETERS) | {"strategy"}


def test_every_option_is_a_parameter_in_python() -> None:
    names = {IN_PYTHON.get(name, name) for name in settings()}
    assert names | {"delays", "save"} == set(PYTHON)


@pytest.mark.parametrize("name", sorted(settings() - OF_ADAPTATION - {"strategies"}))
def test_defaults_are_the_same_everywhere(name: str) -> None:
    field = FIELDS[name]
    expected = field.default
    found = default_of(name)
    if name == "worlds":  # none given is 4, or what --thorough takes
        assert (found, expected) == ((), (4,))
        return
    assert found == expected
    python = PYTHON.get(IN_PYTHON.get(name, name))
    if python is not None:
        assert python.default == expected


def test_what_is_declared_once_is_everywhere() -> None:
    for name, setting in SETTINGS.items():
        assert FIELDS[name].default == PYTHON[name].default == default_of(name)
        assert TAKES[name] == setting.takes
        assert PARAMETERS[name] == name
        assert setting.help in (OPTIONS[name].help or "")


def test_python_refuses_what_is_no_setting() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'step' \(did you mean steps"):
        distcheck.verify("allreduce", step=3)


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
    described = re.findall(r"^ {4}(\w+)  ", Contract.__doc__ or "", re.MULTILINE)
    assert sorted(described) == sorted(fields), "a line for each in the docstring"
    with pytest.raises(ValueError, match="@strategy") as refused:
        distcheck.strategy(micro_batches=0)
    assert all(name in str(refused.value) for name in fields)
