"""The layers of expectation, by the names that a reader sees. No torch.

JSON and the code of the judge use the short aliases; screens and pages use the names. This list is
the only one.
"""

import msgspec

NO_LAYER = "-"  # of checks that compare without an expectation


class Layer(msgspec.Struct, frozen=True):
    """One way to know what is expected: its alias, its name, and what it compares with."""

    alias: str
    name: str
    about: str


LAYERS = {
    layer.alias: layer
    for layer in (
        Layer("lattice", "exact", "a closed form in whole numbers"),
        Layer("X", "bitwise", "the promised order of summation"),
        Layer("R", "rounding bound", "rounding in any order of summation"),
        Layer("S32", "float32 reference", "the whole batch in one process, in float32"),
        Layer("S64", "float64 reference", "the whole batch in one process, in float64"),
    )
}


def layer_name(alias: str) -> str:
    """The name of a layer; nothing for a check without one, and an unknown alias as it is."""
    if alias == NO_LAYER:
        return ""
    return LAYERS[alias].name if alias in LAYERS else alias


def named(check: str, alias: str) -> str:
    """A check with its layer, as `gradients (rounding bound)`."""
    name = layer_name(alias)
    return f"{check} ({name})" if name else check
