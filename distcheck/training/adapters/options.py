"""Parses and validates the options that select a form, into an `Adaptation`."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from distcheck.errors import UsageError, did_you_mean
from distcheck.records import Adaptation, LossName
from distcheck.training.adapters.forms import form_names, trained_with

LOSSES: tuple[str, ...] = get_args(LossName)


def adaptation_of(
    form: str | None = None,
    arguments: Iterable[str] | Mapping[str, Any] = (),
    variables: Iterable[str] | Mapping[str, Any] = (),
    finish: str | None = None,
    reset: str | None = None,
    without_data: Iterable[int] = (),
) -> Adaptation:
    """Parse options (`name=value`), or a mapping from Python. Raises UsageError."""
    return Adaptation(
        form=form,
        arguments=_parse("--arg", arguments),
        variables=_parse("--set", variables),
        finish=finish,
        reset=reset,
        without_data=tuple(without_data),
    )


def check_workloads(adaptation: Adaptation, workloads: Sequence[str]) -> None:
    """Raise UsageError for workloads that cannot train code of this form."""
    trained = trained_with(adaptation.form)
    others = [name for name in workloads if trained and name != trained]
    if others:
        raise UsageError(
            f"--workload {others[0]} cannot be combined with --as {adaptation.form}, which "
            f"trains the code itself with the workload {trained}; remove --workload"
        )


def check_adaptation(adaptation: Adaptation, loss: str) -> None:
    """Raise UsageError for errors that can be found without loading the code."""
    if adaptation.form is not None and adaptation.form not in form_names():
        meant = did_you_mean(adaptation.form, form_names())
        raise UsageError(
            f"unknown form --as {adaptation.form}{meant}; known are {', '.join(form_names())}"
        )
    if loss not in LOSSES:
        meant = did_you_mean(loss, LOSSES)
        raise UsageError(
            f"unknown loss contract --loss {loss}{meant}; known are {', '.join(LOSSES)}"
        )
    for option, pairs in (("--arg", adaptation.arguments), ("--set", adaptation.variables)):
        names = [name for name, _ in pairs]
        for name, value in pairs:
            if not all(part.isidentifier() for part in name.split(".")):
                raise UsageError(f"{option} {name}={value}: {name!r} is not a Python name")
            if names.count(name) > 1:
                raise UsageError(f"{option} {name} is given more than once")
            if not value.startswith("@") and not _is_literal(value):
                raise UsageError(f"{option} {name}: {value!r} is not a Python literal")
    for option, method in (("--finish", adaptation.finish), ("--reset", adaptation.reset)):
        if method is not None and not method.isidentifier():
            raise UsageError(f"{option} {method!r} is not the name of a method")
    without = adaptation.without_data
    if len(set(without)) < len(without):
        raise UsageError(
            f"--without-data {max(without, key=without.count)} is given more than once"
        )


def _parse(option: str, values: Iterable[str] | Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    if isinstance(values, Mapping):
        return tuple((str(name), _text_of(option, name, value)) for name, value in values.items())
    pairs = []
    for word in values:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} {word!r} is not of the form NAME=VALUE")
        as_it_is = value.startswith("@") or _is_literal(value)
        pairs.append((name.strip(), value if as_it_is else repr(value)))
    return tuple(pairs)


def _text_of(option: str, name: str, value: Any) -> str:
    if isinstance(value, str) and value.startswith("@"):
        return value
    text = repr(value)
    if not _is_literal(text):
        raise UsageError(
            f"{option} {name}: {value!r} cannot be sent to another process; pass a Python "
            "literal, @name for the value that distcheck fills in under that name, or "
            "@module:object"
        )
    return text


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
