"""Scores tokens with a model, and measures the noise floor: `distcheck.scores(...)`.

The noise floor of a token is the root mean square, over draws, of the change of its
log-probability when every parameter changes by ±1 ULP at random. Its derivation: let y = W x be
a layer's output. An engine that rounds differently has another error in y, of at most half an
ULP of y for the last rounding, plus that of the accumulation. A perturbation by ±1 ULP changes
y by sum_k d_k w_k x_k with independent signs and u <= |d_k| <= 2 u: about one to two times
u |y| as a root mean square, if the terms have random signs. Both propagate through the same
later layers, to first order by the same derivative. So correct engines should differ by about
one noise floor. Measured: 0.0 to 0.9. Up to 2 in the mean is a pass, more than 8 a failure.

Limits: an accumulation in a lower precision than the parameters' dtype, cancellation (|y| much
smaller than sum |w_k x_k|) and discontinuities (the routing of a mixture of experts) may exceed
it; mistakes that are smaller than 2 noise floors are not detected, and `compare` lists some.
"""

import contextlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from distcheck.errors import UsageError
from distcheck.machine import seeds
from distcheck.machine.numerics import perturbed, spacing
from distcheck.recordings.jobs.records import digest
from distcheck.recordings.scores import SURELY_WRONG, Scores, ScoresAbout, write_scores

Side = Literal["left", "right"]
Call = Callable[..., Any]
# Mistakes whose log-probabilities are written as well, since they need the logits.
TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0)
SMALL, LARGE = 0.99, 0.9  # temperature errors that show how sensitive a comparison is
TF32 = "tf32"
_ROWS = 256  # Heuristic: tokens whose distributions are in memory at once
TOP_P, TOP_K = (0.8, 0.9, 0.95, 0.99), (20, 50)


def scores(
    file: str | os.PathLike[str],
    sequences: Iterable[Sequence[int] | torch.Tensor],
    model: nn.Module | None = None,
    *,
    forward: Call | None = None,
    logprobs: Iterable[Sequence[float | None] | torch.Tensor] | None = None,
    again: Iterable[Sequence[float | None] | torch.Tensor] | None = None,
    start: int | Sequence[int] = 1,
    temperature: float = 1.0,
    batch: int = 8,
    padding: Side = "right",
    draws: int = 4,
    seed: int = 0,
    step: int | None = None,
    dtype: str = "",
) -> None:
    """Write the log-probabilities of tokens, for `distcheck compare A B --scores`.

        distcheck.scores("trainer.safetensors", sequences, model)
        distcheck.scores("rollout.safetensors", sequences, logprobs=from_the_engine)

        sequences    token ids of each sequence, without padding
        model        a module whose parameters are perturbed to measure the noise floor
        forward      forward(tokens, mask, positions) -> logits [batch, tokens, vocabulary], or an
                     object with `.logits`; arguments are int64 of shape [batch, tokens]. It may
                     take fewer arguments. Default: `model`, with `attention_mask` and
                     `position_ids` if it has these parameters
        logprobs     instead of model and forward: natural logarithms of the probabilities of the
                     last tokens of each sequence. The file then has no noise floor
        again        the same, scored a second time
        start        position of the first token to score, from 1: one for all sequences, or one
                     each. With `logprobs`, their number decides
        temperature  temperature of the scores: logits are divided by it; with `logprobs`, a record
        batch        sequences per forward pass
        padding      side of the padding
        draws        number of perturbations
        step         the optimizer step after which the model was scored, if known
        dtype        dtype of the engine's computation; found by itself for a model

    The model is scored in eval mode, also with another batch size and order, with padding on the
    other side, once more unchanged, and `draws` times with every parameter perturbed by ±1 ULP at
    random: the root mean square of these changes is the noise floor. Modes, parameters and RNG
    states are restored bitwise. With several ranks all must call it; rank 0 writes. Raises
    UsageError.
    """
    given = [_as_tokens(one) for one in sequences]
    about = ScoresAbout(dtype=dtype, temperature=temperature, step=step)
    if logprobs is not None:
        if model is not None or forward is not None:
            raise UsageError("distcheck.scores takes either a model (or forward=) or logprobs=")
        lists = {"logprobs": logprobs, **({} if again is None else {"with/again": again})}
        flat = {name: _as_lists(name, one, given) for name, one in lists.items()}
        starts = [len(g) - len(own) for g, own in zip(given, flat["logprobs"], strict=True)]
        columns = {name: torch.cat(own) for name, own in flat.items() if own}
    else:
        starts = [start] * len(given) if isinstance(start, int) else [*start]
        _check_request(given, starts, temperature, batch, draws)
        scorer = _Scorer(model, forward, given, starts, temperature, batch, padding)
        columns = scorer.measure(draws, seed)
        found = dtype or scorer.dtype_name
        weights = digests(model) if model is not None else {}
        about = msgspec.structs.replace(about, dtype=found, weights=weights)
    _write(Path(file), given, starts, columns, about)


def _write(
    file: Path, given: list[torch.Tensor], starts: list[int], columns: dict[str, torch.Tensor],
    about: ScoresAbout,
) -> None:  # fmt: skip
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        lengths = torch.tensor([len(one) for one in given], dtype=torch.int64)
        tokens = torch.cat([torch.empty(0, dtype=torch.int64), *given])
        first = torch.tensor(starts, dtype=torch.int64)
        write_scores(Scores(file, about, tokens, lengths, first, columns))


def _as_tokens(one: Sequence[int] | torch.Tensor) -> torch.Tensor:
    tokens = torch.as_tensor(one).detach().cpu()
    if tokens.dim() != 1 or tokens.is_floating_point():
        raise UsageError(
            f"a sequence has shape {tuple(tokens.shape)} and dtype {tokens.dtype}; pass a list of "
            "token ids per sequence, without padding: [row[keep] for row, keep in zip(ids, mask)]"
        )
    return tokens.long()


def _as_lists(name: str, lists: Iterable[Any], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the log-probabilities of each sequence's last tokens; a leading None is left out."""
    found = []
    for one in lists:
        if not isinstance(one, torch.Tensor):
            numbers = [math.nan if n is None else float(n) for n in one]
            one = torch.tensor(numbers[bool(numbers) and one[0] is None :])
        one = one.detach().cpu()
        found.append(one if one.dtype == torch.float64 else one.float())
    if len(found) != len(given):
        raise UsageError(
            f"there are {len(given)} sequences and {len(found)} lists of {name}; pass one for each"
        )
    for number, (tokens, own) in enumerate(zip(given, found, strict=True)):
        if not 0 < len(own) < len(tokens):
            raise UsageError(
                f"sequence {number} has {len(tokens)} tokens and {len(own)} {name}; pass one for "
                "each of its last tokens, and none for the first token"
            )
    return found


def _check_request(
    given: list[torch.Tensor], starts: list[int], temperature: float, batch: int, draws: int
) -> None:
    for name, value in {"temperature": temperature, "batch": batch, "draws": draws}.items():
        if not value > 0:
            raise UsageError(f"distcheck.scores: {name} is {value}; expected a positive number")
    if len(starts) != len(given):
        raise UsageError(
            f"there are {len(given)} sequences and {len(starts)} starts; pass one each"
        )
    for number, (tokens, first) in enumerate(zip(given, starts, strict=True)):
        if not 0 < first < len(tokens):
            raise UsageError(
                f"sequence {number} has {len(tokens)} tokens, and none is scored from position "
                f"{first} on; pass a start from 1 to {len(tokens) - 1}, or leave the sequence out"
            )


class _DtypeMode(TorchFunctionMode):
    """Records the coarsest floating-point dtype of all results of torch functions."""

    dtype = torch.float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                self.dtype = max(self.dtype, one.dtype, key=spacing)
        return result


def _effective(dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype whose spacing products have, and its name: with TensorFloat-32, which has
    the precision of float16, or bfloat16, that of the factors.
    """
    of = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = of.matmul.fp32_precision
    if precision == "none":
        precision = getattr(torch.backends, "fp32_precision", precision)
    if dtype == torch.float32 and precision in ("tf32", "bf16"):
        return (torch.float16, TF32) if precision == "tf32" else (torch.bfloat16, "bfloat16")
    return dtype, str(dtype).removeprefix("torch.")


class _Scorer:
    """Scores the sequences with one model, in different ways."""

    def __init__(
        self, model: nn.Module | None, forward: Call | None, given: list[torch.Tensor],
        starts: list[int], temperature: float, batch: int, padding: Side,
    ) -> None:  # fmt: skip
        if model is None and forward is None:
            raise UsageError("distcheck.scores needs a model, forward= or logprobs=")
        self._model, self._given, self._starts = model, given, starts
        self._temperature, self._batch, self._padding = temperature, batch, padding
        self._call, self._takes_both_sides = _caller(model, forward)
        one = next(model.parameters(), None) if model is not None else None
        self._device = torch.device("cpu") if one is None else one.device
        self.dtype, self.dtype_name = torch.float64, ""

    @contextlib.contextmanager
    def _in_eval_mode(self) -> Iterator[None]:
        """Score in eval mode without gradients; restore modes and the RNGs of Python and NumPy."""
        modules = [] if self._model is None else [*self._model.modules()]
        modes, states = [one.training for one in modules], seeds.library_rng_states()
        try:
            for one in modules:
                one.training = False
            with torch.no_grad():
                yield
        finally:
            for one, mode in zip(modules, modes, strict=True):
                one.training = mode
            seeds.set_library_states(states)

    def measure(self, draws: int, seed: int) -> dict[str, torch.Tensor]:
        """Return all columns of the file."""
        with self._in_eval_mode():
            return self._measure(draws, seed)

    def _measure(self, draws: int, seed: int) -> dict[str, torch.Tensor]:
        every, number = range(len(self._given)), len(self._given)
        columns = self._columns(every, with_hypotheses=True)
        base = columns["logprobs"]
        with contextlib.ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # operators within compiled code are not seen
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            mode = stack.enter_context(_DtypeMode())
            self._score([0])
        self.dtype, self.dtype_name = _effective(mode.dtype, self._device)
        columns["with/again"] = self._score(every, seed=seeds.derive(seed, "scores again"))
        if number > 1:
            columns["with/batch"] = self._score(every[::-1], batch=1 if self._batch > 1 else 2)
        if self._takes_both_sides and len({*map(len, self._given)}) > 1:
            other: Side = "left" if self._padding == "right" else "right"
            columns["with/padding"] = self._score(every, padding=other)
        if self._model is not None:
            squares = torch.zeros(len(base), dtype=torch.float64)
            for draw in range(draws):
                with self._perturbed_parameters(self._model, seed, draw):
                    squares += (self._score(every) - base).double().square()
            columns["floor"] = (squares / draws).sqrt().float()
        return columns

    @contextlib.contextmanager
    def _perturbed_parameters(self, model: nn.Module, seed: int, draw: int) -> Iterator[None]:
        """Perturb every parameter by ±1 ULP of the coarser of its dtype and the computation's."""
        kept = []
        try:
            for name, parameter in model.named_parameters():
                own = parameter.detach()
                own = own.to_local() if hasattr(own, "to_local") else own
                if not own.is_floating_point() or own.element_size() == 1:
                    continue  # integers, and float8, which has no arithmetic
                kept.append((own, own.clone()))
                moves = torch.Generator().manual_seed(seeds.derive(seed, f"scores {name}", draw))
                own.copy_(perturbed(own.cpu(), moves, self.dtype))
            yield
        finally:
            for own, before in kept:
                own.copy_(before)

    def _score(self, order: Iterable[int], **how: Any) -> torch.Tensor:
        return self._columns(order, **how)["logprobs"]

    def _columns(
        self, order: Iterable[int], *, batch: int = 0, padding: Side | None = None,
        seed: int | None = None, with_hypotheses: bool = False,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Return the log-probabilities of all sequences in `order`, in the order of the file. Each
        call starts with the same RNG state, unless there is a `seed`.
        """
        order, found = [*order], {}
        side, size = padding or self._padding, batch or self._batch
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices=[*devices]):
            if seed is not None:
                seeds.seed_everything(seed)
            for first in range(0, len(order), size):
                for number, rows in self._rows(order[first : first + size], side):
                    chosen = self._given[number][self._starts[number] :].to(rows.device)
                    blocks = zip(rows.split(_ROWS), chosen.split(_ROWS), strict=True)
                    found[number] = [self._of_rows(*one, with_hypotheses) for one in blocks]
        ordered = [one for number in sorted(found) for one in found[number]]
        return {name: torch.cat([one[name] for one in ordered]) for name in ordered[0]}

    def _rows(self, numbers: list[int], side: Side) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the logits that predict the scored tokens of each sequence of a batch."""
        lengths = [len(self._given[number]) for number in numbers]
        width = max(map(len, self._given))  # in every batch, which must not change the padding
        tokens = torch.zeros(len(numbers), width, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        begins = [0 if side == "right" else width - length for length in lengths]
        for row, (number, begin) in enumerate(zip(numbers, begins, strict=True)):
            tokens[row, begin : begin + lengths[row]] = self._given[number]
            mask[row, begin : begin + lengths[row]] = 1
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        result = self._call(*(one.to(self._device) for one in (tokens, mask, positions)))
        logits: Any = getattr(result, "logits", result)
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != tokens.shape:
            shape = getattr(logits, "shape", None)
            text = type(logits).__name__ if shape is None else f"shape {tuple(shape)}"
            raise UsageError(
                f"the model returned {text} for tokens of shape {tuple(tokens.shape)}; expected "
                "logits [batch, tokens, vocabulary]: pass forward="
            )
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < logits.shape[-1]:
            raise UsageError(
                f"tokens are from {int(tokens.min())} to {int(tokens.max())}, and the model has a "
                f"vocabulary of {logits.shape[-1]}; use the model's tokenizer"
            )
        for row, (number, begin) in enumerate(zip(numbers, begins, strict=True)):
            rows = logits[row, begin + self._starts[number] - 1 : begin + lengths[row] - 1]
            yield number, rows if rows.dtype == torch.float64 else rows.float()

    def _of_rows(
        self, rows: torch.Tensor, chosen: torch.Tensor, with_hypotheses: bool
    ) -> dict[str, torch.Tensor]:
        """Return the log-probabilities of chosen tokens, and those that mistakes would give."""

        def at(temperature: float) -> torch.Tensor:
            return torch.log_softmax(rows / temperature, -1)

        own, index = self._temperature, chosen[:, None]
        logp = at(own)
        found = {"logprobs": logp.gather(-1, index)[:, 0]}
        if not with_hypotheses:
            return {"logprobs": found["logprobs"].cpu()}
        for other in dict.fromkeys((*TEMPERATURES, own * SMALL, own * LARGE, own * own)):
            if other != own:
                name = f"if/temperature {other:.6g}"
                found[name] = at(other).gather(-1, index)[:, 0]
        largest = logp.double().exp().sort(-1, descending=True).values
        before = largest.cumsum(-1) - largest
        kept = {f"if/top-p {p:g}": before < p for p in TOP_P}
        ranks = torch.arange(largest.shape[-1], device=rows.device)
        kept |= {f"if/top-k {k}": (ranks < k).expand_as(largest) for k in TOP_K}
        probability = found["logprobs"].double().exp()
        for name, one in kept.items():
            least = torch.where(one, largest, 2.0).min(-1).values
            mass = torch.where(one, largest, 0.0).sum(-1)
            lost = torch.where(probability < least, SURELY_WRONG, 0.0)
            found[name] = (found["logprobs"] - mass.log() - lost).clamp_max(0).to(rows.dtype)
        return {name: one.cpu() for name, one in found.items()}


def _caller(model: nn.Module | None, forward: Call | None) -> tuple[Call, bool]:
    """Return a call with tokens, mask and positions, and True if padding may be on both sides."""
    target = forward or getattr(model, "forward", model)
    assert target is not None
    parameters = inspect.signature(target).parameters
    if forward is None:
        assert model is not None
        names = [name for name in ("attention_mask", "position_ids") if name in parameters]

        def call(tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> Any:
            given = {"attention_mask": mask, "position_ids": positions}
            return model(tokens, **{name: given[name] for name in names})

        return call, len(names) == 2
    takes = [
        one
        for one in parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    several = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
    number = 3 if several else min(3, len(takes))
    return lambda *given: forward(*given[:number]), number == 3


def digests(model: nn.Module) -> dict[str, str]:
    """Return dtype, shape and digest of every parameter; none for sharded parameters."""
    found: dict[str, str] = {}
    if any(hasattr(one, "to_local") for one in model.parameters()):
        return found
    for name, parameter in model.named_parameters():
        # A copy: a storage that NumPy uses cannot be resized, as FSDP2 does.
        own = parameter.detach().clone().cpu().contiguous().reshape(-1).view(torch.uint8)
        kind = str(parameter.dtype).removeprefix("torch.")
        found[name] = f"{kind}{[*parameter.shape]} {digest(own.numpy().data)}"
    return found
