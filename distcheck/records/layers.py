"""The layers of expectation, by their displayed names. No torch.

JSON uses the short aliases, code the constants below, screens and pages the names. No other module
writes an alias, except those of the cells (`tests/unit/test_layers.py`).
"""

from collections.abc import Iterable

import msgspec

NO_LAYER = "-"  # of checks that compare without an expectation
EXACT, BITWISE, ROUNDING, IN_FLOAT32, IN_FLOAT64 = (
    "lattice",
    "bitwise",
    "rounding",
    "full batch float32",
    "full batch float64",
)
_ANY, _SINGLE, _DOUBLE = ("float32", "float64", "bfloat16", "float16"), ("float32",), ("float64",)


class Layer(msgspec.Struct, frozen=True):
    """One kind of expectation: its alias, its name, its source, and its file in `judge/oracles/`.
    It applies to cases in `dtypes`; those of the lattice use only their own. `whole_batch`: it
    expects the full batch's gradient and loss.
    """

    alias: str
    name: str
    about: str
    oracle: str
    dtypes: tuple[str, ...] = ()
    full_batch: bool = False


_WHOLE = "single-process training on the global batch in"
LAYERS = {
    layer.alias: layer
    for layer in (
        Layer(EXACT, "exact", "an integer-valued closed form", "closed_form"),
        Layer(BITWISE, "bitwise", "the promised summation order", "bitwise", _ANY),
        Layer(ROUNDING, "rounding bound", "the rounding of any summation order", "any_order", _ANY),
        Layer(IN_FLOAT32, "float32 reference", f"{_WHOLE} float32", "whole_batch", _SINGLE, True),
        Layer(IN_FLOAT64, "float64 reference", f"{_WHOLE} float64", "whole_batch", _DOUBLE, True),
    )
}
FULL_BATCH_LAYERS = tuple(alias for alias, layer in LAYERS.items() if layer.full_batch)
_PLANNED_APART = (EXACT, BITWISE, ROUNDING, *FULL_BATCH_LAYERS)


def layers_of(dtype: str) -> tuple[str, ...]:
    return tuple(alias for alias, layer in LAYERS.items() if dtype in layer.dtypes)


def further_layers(aliases: Iterable[str]) -> list[str]:
    """Return the layers that depend only on the dtype: gradients are judged by each."""
    return [alias for alias in aliases if alias not in _PLANNED_APART]


def layer_name(alias: str) -> str:
    """Return the name of a layer; "" for a check without one; an unknown alias unchanged."""
    if alias == NO_LAYER:
        return ""
    return LAYERS[alias].name if alias in LAYERS else alias


def named(check: str, alias: str) -> str:
    """Format a check with its layer, as `gradients (rounding)`."""
    name = layer_name(alias)
    return f"{check} ({name})" if name else check


def oracle_of(alias: str) -> str:
    """Return the file in `judge/oracles/` with a layer's expectations, or those without a layer."""
    return "unlayered" if alias == NO_LAYER else LAYERS[alias].oracle


# Beginning of the message of check `outputs` if no rank returned any.
NO_OUTPUTS = (
    "outputs are not compared: backward() computed its loss without loss_of(batch) and without "
    "loss_of.given(outputs, batch), through which distcheck records the model's outputs"
)
# Beginning of the message of check `agreement` about tensors that ranks unsharded collectively.
TOGETHER = (
    "agreement cannot be checked for unsharded tensors: an accessor, a broadcast or "
    "full_tensor() returns the same result on all ranks, whatever each rank holds"
)
