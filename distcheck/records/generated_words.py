"""Generated models as text: the syntax of `--workload generated:WORDS`. Does not import torch.

    generated:conv2.strided-linear3.bias.frozen-scale;adam;samples=20

Layers are joined by `-`, in the order of the forward pass. A layer has a kind, a size if the kind
takes one, and marks. After `;` follow the optimizer (sgd, momentum or adam; default: sgd), `groups`
for two parameter groups, `schedule` for learning rates that change in every step, the number of
training samples, and `accumulate=N` for N backward passes per step. These words describe the model
completely, so a case that contains them can be replayed.

    linear N    a linear layer with N output features, then tanh
    conv N      a 2x2 convolution with N output channels, then tanh
    scale       one scalar (0-d) parameter
    table N     a vector of N elements that every sample uses
    running     a buffer with the running mean of the activations; no parameter
    norm        BatchNorm over the samples' two channels; only as the first layer

    bias        a linear or conv has a bias
    frozen      requires no gradient
    strided     not contiguous: transposed in memory (linear) or channels_last (conv)
    tied        a linear's weight is used a second time, transposed
    absent      used by half of the samples; its gradient is None on a rank without these samples
    nestedN     is nested in N modules, shared with a neighbor that is nested as well
"""

import re

import msgspec

from distcheck.errors import UsageError

PREFIX = "generated:"
KINDS = ("linear", "scale", "table", "conv", "running", "norm")
MARKS = ("bias", "frozen", "strided", "tied", "absent")
NESTED, GROUPS, SCHEDULE = "nested", "groups", "schedule"
OPTIMIZERS = ("sgd", "momentum", "adam")
EXPLORED_DTYPES = ("float32", "float64", "bfloat16")
SAMPLES = 512
MOST_ACCUMULATE = 4  # backward passes in a step
MOST_NESTED = 3  # one less than a power of two
SHAPE = (2, 4, 4)  # of a sample: channels, height, width
MARKS_OF = {
    "linear": MARKS,
    "conv": ("bias", "frozen", "strided", "absent"),
    "scale": ("frozen", "absent"),
    "table": ("frozen", "absent"),
    "running": (),
    "norm": ("frozen",),
}
_MOST = {"linear": 4096, "conv": 64, "table": 10_000_000}
_MOST_CONVS = SHAPE[1] - 1  # each removes one pixel from either side
_ACCUMULATE = tuple(map(str, range(2, MOST_ACCUMULATE + 1)))
_NESTED = {f"{NESTED}{depth}": depth for depth in range(1, MOST_NESTED + 1)}
_LAYER = re.compile(r"([a-z]+)(\d*)((?:\.[a-z]+\d*)*)", re.ASCII)


class GeneratedLayer(msgspec.Struct, frozen=True):
    """One layer; `size` is 0 for a kind without a size. `nested` modules enclose the layer."""

    kind: str
    size: int = 0
    marks: tuple[str, ...] = ()
    nested: int = 0

    @property
    def words(self) -> str:
        marks = [*self.marks, *([f"{NESTED}{self.nested}"] if self.nested else [])]
        return "".join([self.kind, str(self.size or ""), *(f".{mark}" for mark in marks)])


class GeneratedModelSpec(msgspec.Struct, frozen=True):
    """A generated model, its optimizer, its number of samples, its backward passes per step, its
    number of param groups (one or two), and whether its learning rates change.
    """

    layers: tuple[GeneratedLayer, ...]
    optimizer: str = "sgd"
    samples: int = SAMPLES
    accumulate: int = 1
    groups: bool = False
    schedule: bool = False

    @property
    def words(self) -> str:
        """Return the text without the prefix."""
        parts = ["-".join(layer.words for layer in self.layers)]
        parts += [self.optimizer] if self.optimizer != "sgd" else []
        parts += [GROUPS] if self.groups else []
        parts += [SCHEDULE] if self.schedule else []
        parts += [f"samples={self.samples}"] if self.samples != SAMPLES else []
        parts += [f"accumulate={self.accumulate}"] if self.accumulate != 1 else []
        return ";".join(parts)

    @property
    def workload(self) -> str:
        return PREFIX + self.words


def parse_model_words(words: str) -> GeneratedModelSpec:
    """Parse `words` (without the prefix). Raises UsageError."""
    first, *options = words.split(";")
    layers = tuple(_layer(part, words) for part in first.split("-"))
    _check_order(layers, words)
    optimizer, samples, accumulate = "sgd", SAMPLES, 1
    for option in options:
        name, _, value = option.partition("=")
        if option in OPTIMIZERS:
            optimizer = option
        elif option in (GROUPS, SCHEDULE):
            pass
        elif name == "samples" and value.isdecimal() and 0 < int(value) <= 10**6:
            samples = int(value)
        elif name == "accumulate" and value in _ACCUMULATE:
            accumulate = int(value)
        else:
            raise _refusal(
                words,
                f"{option!r} is not one of {', '.join(OPTIMIZERS)}, {GROUPS}, {SCHEDULE}, "
                f"samples=N, and accumulate=N with N from 2 to {MOST_ACCUMULATE}",
            )
    return GeneratedModelSpec(
        layers, optimizer, samples, accumulate, GROUPS in options, SCHEDULE in options
    )


def _layer(part: str, words: str) -> GeneratedLayer:
    found = _LAYER.fullmatch(part)
    if found is None or found[1] not in KINDS:
        raise _refusal(words, f"{part!r} is not a layer; kinds are {', '.join(KINDS)}")
    kind, size, marks = found[1], int(found[2] or 0), tuple(found[3].split(".")[1:])
    most = _MOST.get(kind, 0)
    if not min(most, 1) <= size <= most:
        wanted = f"a size from 1 to {most}, for example {kind}3" if most else "no size"
        raise _refusal(words, f"{part!r}: {kind} takes {wanted}")
    if strange := [mark for mark in marks if mark not in (*MARKS_OF[kind], *_NESTED)]:
        known = ", ".join((*MARKS_OF[kind], f"{NESTED}1 to {NESTED}{MOST_NESTED}"))
        raise _refusal(words, f"{part!r}: {kind} does not take {strange[0]!r}; it takes {known}")
    nested = max((_NESTED[mark] for mark in marks if mark in _NESTED), default=0)
    return GeneratedLayer(kind, size, tuple(mark for mark in MARKS if mark in marks), nested)


def _check_order(layers: tuple[GeneratedLayer, ...], words: str) -> None:
    convs = [n for n, layer in enumerate(layers) if layer.kind == "conv"]
    linears = [n for n, layer in enumerate(layers) if layer.kind == "linear"]
    if convs and linears and max(convs) > min(linears):
        raise _refusal(words, "a conv needs an image, so it must precede every linear layer")
    if any(layer.kind == "norm" for layer in layers[1:]):
        raise _refusal(words, "there is at most one norm, and it must precede every other layer")
    if len(convs) > _MOST_CONVS:
        raise _refusal(words, f"more than {_MOST_CONVS} convs reduce a 4x4 image to nothing")
    if not any(is_trainable_layer(layer) for layer in layers):
        raise _refusal(words, "no parameter is trainable")
    if not any(is_trainable_layer(layer) and "absent" not in layer.marks for layer in layers):
        raise _refusal(
            words,
            "every trainable layer is absent for half of the samples; keep one layer for "
            "all samples",
        )


def is_trainable_layer(layer: GeneratedLayer) -> bool:
    return layer.kind != "running" and "frozen" not in layer.marks


def _refusal(words: str, why: str) -> UsageError:
    return UsageError(f"workload {PREFIX}{words}: {why}")
