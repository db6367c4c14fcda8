"""The layers of expectation, by the names that a reader sees. No torch.

JSON uses the short aliases, code the constants below, screens and pages the names. No other module
spells an alias out, but those of the cells (`tests/unit/test_layers.py`).
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
    """One way to know what is expected: its alias, its name, what it compares with, and its file in
    `judge/oracles/`. Cases in `dtypes` are judged by it; those of the lattice by its own alone.
    `whole_batch`: it expects the whole batch's gradient and loss.
    """

    alias: str
    name: str
    about: str
    oracle: str
    dtypes: tuple[str, ...] = ()
    full_batch: bool = False


_WHOLE = "the whole batch in one process, in"
LAYERS = {
    layer.alias: layer
    for layer in (
        Layer(EXACT, "exact", "a closed form in whole numbers", "closed_form"),
        Layer(BITWISE, "bitwise", "the promised order of summation", "bitwise", _ANY),
        Layer(ROUNDING, "rounding bound", "rounding in any order of summation", "any_order", _ANY),
        Layer(IN_FLOAT32, "float32 reference", f"{_WHOLE} float32", "whole_batch", _SINGLE, True),
        Layer(IN_FLOAT64, "float64 reference", f"{_WHOLE} float64", "whole_batch", _DOUBLE, True),
    )
}
FULL_BATCH_LAYERS = tuple(alias for alias, layer in LAYERS.items() if layer.full_batch)
_PLANNED_APART = (EXACT, BITWISE, ROUNDING, *FULL_BATCH_LAYERS)


def layers_of(dtype: str) -> tuple[str, ...]:
    return tuple(alias for alias, layer in LAYERS.items() if dtype in layer.dtypes)


def further_layers(aliases: Iterable[str]) -> list[str]:
    """Those that need nothing of a case but its dtype: gradients are judged by each."""
    return [alias for alias in aliases if alias not in _PLANNED_APART]


def layer_name(alias: str) -> str:
    """The name of a layer; nothing for a check without one, and an unknown alias as it is."""
    if alias == NO_LAYER:
        return ""
    return LAYERS[alias].name if alias in LAYERS else alias


def named(check: str, alias: str) -> str:
    """A check with its layer, as `gradients (rounding)`."""
    name = layer_name(alias)
    return f"{check} ({name})" if name else check


def oracle_of(alias: str) -> str:
    """The file in `judge/oracles/` that says what a check expects by a layer, or without one."""
    return "unlayered" if alias == NO_LAYER else LAYERS[alias].oracle


# Begins what the check `outputs` says where no rank gave any.
NO_OUTPUTS = (
    "outputs are not compared: backward() computed its loss without loss_of(batch) and without "
    "loss_of.given(outputs, batch), where distcheck sees what the model returns"
)
# Begins what the check `agreement` says of tensors that all ranks hold because they put them
# together.
TOGETHER = (
    "agreement shows nothing of tensors that ranks put together: an accessor, a broadcast or "
    "full_tensor() gives all of them one result, whatever each holds"
)
