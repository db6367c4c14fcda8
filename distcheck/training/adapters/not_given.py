"""Stand-ins for what the code names and nothing is known of: they fail only when they are used.

A script's loss list, its logger, a second communicator: much of what code names is never reached
in a synchronisation. What is reached ends the run with the option that gives it a value.
"""

from typing import Any, NoReturn

from distcheck.errors import UsageError


class NotKnownError(UsageError, AttributeError):
    """An attribute that nothing is known of. Code that asks for it with a default gets that."""


class NotGiven:
    """A value that was not given: every use of it raises UsageError. `stand_in` makes one."""

    def __init__(self, sentence: str) -> None:
        object.__setattr__(self, "_sentence", sentence)

    def __repr__(self) -> str:
        return f"<not given: {object.__getattribute__(self, '_sentence')}>"

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # inspection asks for these, and takes no for an answer
        return _refuse(self)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)]
        _refuse(found[0]) if found else NotImplemented


def _refuse(missing: NotGiven, *_: Any, **__: Any) -> NoReturn:
    raise UsageError(object.__getattribute__(missing, "_sentence"))


_made: dict[str, str] = {}  # sentences by the name of the stand-in's class


def stand_in(name: str, sentence: str) -> NotGiven:
    """A value under this name that fails with this sentence when it is used."""
    kind = f"NotGiven_{name}"
    _made[kind] = sentence
    made: NotGiven = type(kind, (NotGiven,), {})(sentence)
    return made


def explain(error: TypeError) -> None:
    """Raises UsageError where a function refused a stand-in, which it names by its class."""
    for kind, sentence in _made.items():
        if kind in str(error):
            raise UsageError(sentence) from error


_USES = (
    "call bool len iter next getitem setitem delitem contains enter exit index int float complex "
    "round hash str format eq ne lt le gt ge neg pos abs invert add sub mul matmul truediv "
    "floordiv mod divmod pow lshift rshift and or xor radd rsub rmul rmatmul rtruediv rfloordiv "
    "rmod rdivmod rpow rlshift rrshift rand ror rxor iadd isub imul itruediv"
)
for _use in _USES.split():
    setattr(NotGiven, f"__{_use}__", _refuse)
