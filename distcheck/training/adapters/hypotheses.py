"""Lists the ways in which a piece of code may be called, if no option selects one.

The form selected first is a guess from a signature, a name or a use. `ways_to_call` lists the
alternatives that the code permits, each as the `Adaptation` that options would select. They are in
tiers: a different form; a different method after backward or before a step; both. All keep the
given options. `verification/guesses.py` tries them if a guess fails.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import torch
from msgspec.structs import replace
from torch import nn

from distcheck.contract import CONTRACT_ATTRIBUTE, Step
from distcheck.errors import UsageError
from distcheck.records import Adaptation
from distcheck.training.adapters.forms import FORMS, choose_form, form_of, is_context_function
from distcheck.training.adapters.forms.own_optimizer import parameters_name
from distcheck.training.adapters.forms.wrapper import can_fill_arguments, phase_methods
from distcheck.training.adapters.names import NO_FINISH, meaning_of
from distcheck.training.adapters.source import COLLECTIVES, SENDS_PARAMETERS, Source
from distcheck.training.adapters.target import (
    Target,
    author_methods,
    is_single_process_default,
    named_parameters,
    parameter_meaning,
    public_method_names,
    required_parameters,
)
from distcheck.training.adapters.unknown import UnknownArgumentsError
from distcheck.training.adapters.values import candidate_values, class_for_argument
from distcheck.training.loaded import LoadedStrategy

Tiers = tuple[tuple[Adaptation, ...], ...]
_MOST = 12  # Heuristic: ways of a tier; each costs a world and a judge
_MOST_UNKNOWN = 3  # arguments whose values are tried together; chosen
_BY_KIND = {
    "model": "model", "models": "model", "optimizer": "model", "parameters": "parameters",
    "gradients": "gradients", "tensor": "tensor-mean",
}  # fmt: skip
_DIVIDES = {"average", "avg", "mean", "divide", "normalize", "average_gradients", "take_mean"}
# Methods of a wrapper that a training loop uses for other purposes.
_NO_PHASES = {
    "forward", "parameters", "named_parameters", "buffers", "named_buffers", "state_dict",
    "load_state_dict", "train", "eval", "no_sync", "zero_grad", "scale_loss", "step", "close",
    "shutdown", "to", "cuda", "cpu", "save", "load", "extra_repr", "backward",
}  # fmt: skip


def ways_to_call(target: Target, load: Callable[[Adaptation], LoadedStrategy]) -> Tiers:
    """Return the alternatives that `load` accepts; none if the code declares how it is called."""
    once: Sequence[tuple[str, str]] = ()
    unknown = _unknown_of_maker(target)
    try:
        once = load(target.adaptation).handed_once
    except UnknownArgumentsError as error:
        unknown = error.values
    except UsageError:
        pass
    tiers = _tiers(target, once)
    if tiers:
        tiers[0][:0] = _combine_values(target.adaptation, unknown)
    loading = ([way for way in tier if _loads(load, way)] for tier in tiers)
    return tuple(tuple(tier[:_MOST]) for tier in loading if tier)


def _unknown_of_maker(target: Target) -> dict[str, list[str]]:
    """The values to try for what the constructor of a method's object asks for."""
    made = target.value if target.is_class else target.owner
    if made is None or choose_form(target) not in (None, form_of("method")):
        return {}
    asked = [
        p for p in required_parameters(named_parameters(made)) if p.name not in target.arguments
    ]
    unknown = [p for p in asked if not Source(made).meaning_of(p.name)]
    return {
        p.name: candidate_values(p, made) for p in unknown if class_for_argument(p, made) is None
    }


def _combine_values(said: Adaptation, unknown: Mapping[str, Sequence[str]]) -> list[Adaptation]:
    """The same way with each combination of values, the likeliest of all arguments first; none for
    more arguments than can be tried.
    """
    if len(unknown) > _MOST_UNKNOWN:
        return []
    ranked = [list(enumerate(values)) for values in unknown.values()]
    chosen = sorted(product(*ranked), key=lambda each: sum(place for place, _ in each))
    pairs = (zip(unknown, (value for _, value in each), strict=True) for each in chosen if each)
    return [replace(said, arguments=(*said.arguments, *each)) for each in pairs]


def is_declared(target: Target) -> bool:
    """Return True if the code declares how it is called: by methods or a contract, or as a function
    `f(model, step)` that reads attributes of `contract.Step`.
    """
    own = form_of("strategy").fits(target)
    if target.is_function and [p.name for p in target.parameters] == ["model", "step"]:
        read = set[str]().union(*(source.attributes_of("step") for source in target.reached))
        own |= bool(read) and read <= {*dir(Step), *Step.__annotations__}
    return (own and target.adaptation.form is None) or hasattr(target.value, CONTRACT_ATTRIBUTE)


def _tiers(target: Target, handed_once: Sequence[tuple[str, str]]) -> list[list[Adaptation]]:
    if is_declared(target):
        return []
    said = target.adaptation
    guess = choose_form(target)
    form = said.form or (guess.name if guess is not None else None)
    forms = [name for name in _forms(target) if name != form and not said.form]
    others = [replace(said, form=name) for name in forms]
    more = [(form, tuple(handed_once)), (form, _division_flags(target, form))]
    closure = (("closure", "@closure"),) * target.needs_closure
    more += [(one, facts) for one in (form, *forms) for facts in (_facts(target), closure)]
    others += [replace(said, form=f, arguments=(*said.arguments, *p)) for f, p in more if p]
    around = [one for one in (form, *forms) if one in ("optimizer", "sharded-optimizer")]
    after = _methods(target.value) if around and target.is_class and not said.finish else []
    one, both = _phases(target, form)
    return [others, [*(replace(said, form=f, finish=m) for f in around for m in after), *one], both]


def _facts(target: Target) -> tuple[tuple[str, str], ...]:
    """Return the alternative values of parameters whose default is None, or describes a single
    process: a constructor receives the world's values first, a function its defaults.
    """
    facts = () if target.is_class else ("rank", "world_size", "optimizer")
    free = [p for p in target.parameters if p.name not in target.arguments]
    absent = [p for p in free if p.default is None and meaning_of(p.name) in facts]
    found = [p for p in free if p in absent or is_single_process_default(p)]
    return tuple((p.name, repr(p.default) if target.is_class else f"@{p.name}") for p in found)


def _division_flags(target: Target, form: str | None) -> tuple[tuple[str, str], ...]:
    """Return the flag, off by default, that makes a function of a tensor divide the sum."""
    flags = [p.name for p in target.parameters if p.default is False and p.name in _DIVIDES]
    return tuple((name, "True") for name in flags[:1] if form == "tensor-mean")


def _loads(load: Callable[[Adaptation], LoadedStrategy], way: Adaptation) -> bool:
    try:
        load(way)
    except UsageError:
        return False
    return True


def _forms(target: Target) -> list[str]:
    """Return the forms that the code permits, in the order of the table."""
    if target.is_class:
        found = set(_forms_of_class(target.value))
    elif target.is_unbound:
        found = {form for form in ("method", "wrapper") if form_of(form).fits(target)}
    else:
        found = set(_forms_of_function(target)) if target.is_function else set()
    return [form.name for form in FORMS if form.name in found]


def _forms_of_function(target: Target) -> Iterator[str]:
    if is_context_function(target.value):
        yield "context"
        return
    if form_of("comm-hook").fits(target):
        yield "comm-hook"
        return
    kinds = {target.kind_without_name} if target.kind_without_name else _possible_kinds(target)
    if any(source.registers_hooks for source in target.reached):
        yield "hooks"
    makes = target.source.returns_what_it_calls
    if makes and kinds & {"model"}:
        yield "wrapper"
    asked = {target.source.meaning_of(p.name) for p in target.parameters}
    if "optimizer" in kinds or "optimizer" in asked:
        yield from ("step", "optimizer", *["engine"] * makes)
    yield from (name for name in ("after-step", "steps-inside") if form_of(name).fits(target))
    sends = "step" in target.words and target.words & {"broadcast", "send", "isend"}
    if "optimizer" in asked and sends and {"rank", "get_rank"} & {*asked, *target.words}:
        yield "steps-inside"  # one rank's, which sends the parameters
    if not target.source.registers_hooks:
        yield from (_BY_KIND[kind] for kind in kinds)
    if _division_flags(target, "tensor-mean"):  # its caller may divide
        yield "tensor-sum"


def _possible_kinds(target: Target) -> set[str]:
    """Return possible kinds of the first parameter, judged only by its name: no bare tensors if
    gradients are read, and nothing with gradients if none are.
    """
    if not target.first:
        return {"model"}
    reads = any("grad" in source.attributes for source in target.reached)
    return {"model", "parameters"} if reads else {"model", "gradients", "tensor"}


def _forms_of_class(kind: type) -> Iterator[str]:
    taken = required_parameters(named_parameters(kind))
    is_optimizer = issubclass(kind, torch.optim.Optimizer)
    words = set[str]().union(*(Source(getattr(kind, name)).words for name in author_methods(kind)))
    first = parameter_meaning(kind, taken[0]) if taken else ""
    if hasattr(kind, "__enter__") and hasattr(kind, "__exit__"):
        yield "context"
    if (
        taken
        and first in ("optimizer", "")
        and (is_optimizer or "step" in public_method_names(kind))
    ):
        yield "optimizer"
        yield from ["sharded-optimizer"] if words & SENDS_PARAMETERS else []
    if is_optimizer:
        own = ["own-optimizer", *["sharded-optimizer"] * bool(words & SENDS_PARAMETERS)]
        yield from own if parameters_name(kind) else []
        return
    if taken and (first in ("model", "") or first.endswith("parameters")):
        yield "wrapper"
        if words & {"all_gather", "all_gather_into_tensor", "reduce_scatter", "fully_shard"}:
            yield "sharded-module"
        if issubclass(kind, nn.Module) and "apply" in words:
            yield "autograd"


def _phases(target: Target, form: str | None) -> tuple[list[Adaptation], list[Adaptation]]:
    """Return the alternatives with another method after backward or before steps; both."""
    said = target.adaptation
    made = target.owner if target.is_unbound else target.value
    if form is None and not target.is_function:
        kind = made if inspect.isclass(made) else type(made)
        methods = [] if said.finish else _methods(kind)
        return [replace(said, finish=name) for name in methods], []
    if form not in ("wrapper", "sharded-module", "autograd") or not inspect.isclass(made):
        return [], []
    finish, reset = phase_methods(target)
    methods = _methods(made)
    none = [NO_FINISH] if _may_sync_uncalled(made) else []
    after = [name for name in (*methods, *none) if name != (finish or NO_FINISH)]
    before = [name for name in methods if name not in (finish, reset)]
    after = [] if said.finish or target.is_unbound else after
    before = [] if said.reset else before
    base = replace(said, form=form, finish=None if target.is_unbound else finish or NO_FINISH)
    base = replace(base, reset=reset or None)
    one = [replace(base, reset=name) for name in before]
    one += [replace(base, finish=name) for name in after]
    both = product(before, after)
    return one, [replace(base, finish=f, reset=r) for r, f in both if f != r]


def _may_sync_uncalled(kind: type) -> bool:
    """Return True if its objects may synchronize without a call: by hooks, or in forward."""
    members = author_methods(kind)
    sources = [Source(getattr(kind, name)) for name in members]
    forward = [Source(getattr(kind, n)) for n in ("forward", "__call__") if n in members]
    words = set[str]().union(*(source.words for source in forward))
    return any(s.registers_hooks for s in sources) or bool(words & {*COLLECTIVES, "apply"})


def _methods(kind: type) -> list[str]:
    """Return the methods that a training loop may call directly."""
    return [
        n
        for n in public_method_names(kind)
        if n not in _NO_PHASES and can_fill_arguments(getattr(kind, n))
    ]
