"""Parameters of which an accessor gave nothing: not recorded, so nothing passes by them."""

import torch

_VALUE, _GRADIENT = "_distcheck_value_unknown", "_distcheck_gradient_unknown"


def mark(
    parameter: torch.Tensor,
    *,
    value_unknown: bool | None = None,
    gradient_unknown: bool | None = None,
) -> None:
    """Notes whether a parameter's value, or its gradient, is unknown; None leaves it as it is."""
    for name, unknown in ((_VALUE, value_unknown), (_GRADIENT, gradient_unknown)):
        if unknown is not None:
            setattr(parameter, name, unknown)


def value_unknown(parameter: torch.Tensor | None) -> bool:
    """Whether nothing is known of its value."""
    return getattr(parameter, _VALUE, False)


def gradient_unknown(parameter: torch.Tensor | None) -> bool:
    """Whether nothing is known of its gradient."""
    return getattr(parameter, _GRADIENT, False)
