"""The layers of expectation, by the names that a reader sees. No torch.

JSON uses the short aliases, code the constants below, screens and pages the names. No other module
spells an alias out, but those of the cells (`tests/unit/test_layers.py`).
"""

import msgspec

NO_LAYER = "-"  # of checks that compare without an expectation
BITWISE, ROUNDING, IN_FLOAT32, IN_FLOAT64 = "X", "R", "S32", "S64"


class Layer(msgspec.Struct, frozen=True):
    """One way to know what is expected: its alias, its name, and what it compares with."""

    alias: str
    name: str
    about: str


LAYERS = {
    layer.alias: layer
    for layer in (
        Layer("lattice", "exact", "a closed form in whole numbers"),
        Layer(BITWISE, "bitwise", "the promised order of summation"),
        Layer(ROUNDING, "rounding bound", "rounding in any order of summation"),
        Layer(IN_FLOAT32, "float32 reference", "the whole batch in one process, in float32"),
        Layer(IN_FLOAT64, "float64 reference", "the whole batch in one process, in float64"),
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
