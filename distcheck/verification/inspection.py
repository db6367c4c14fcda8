"""The first job of a run: inspects strategy, workload, data and machine before any rank starts."""

import ast
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from distcheck import __version__, backends, registry
from distcheck.backends import nccl
from distcheck.contract import Contract
from distcheck.errors import CannotRunError, UsageError
from distcheck.judge import acceptance
from distcheck.machine import devices, seeds
from distcheck.machine.compat import BatchNorm, TorchDispatchMode, tree_leaves
from distcheck.machine.numerics import spacing
from distcheck.machine.resources import cores
from distcheck.plan.source_files import matches_in_sources
from distcheck.recordings.traces.layout import BYTES, OUTPUTS
from distcheck.records import Adaptation, Case, TensorSpec
from distcheck.records.decoding import parse_source
from distcheck.training.adapters.forms import trained_with
from distcheck.training.building import (
    Ingredients,
    counts_tokens,
    describe_model,
    names_sharing_storage,
    open_ingredients,
    update_is_repeatable,
)
from distcheck.training.jobs import EXAMINE, INSPECT, WAYS, CaseFacts, CodeFacts, InspectionRequest
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.loading import CodeInspection, load_strategy, other_ways
from distcheck.training.loading import inspect_strategy as look_at_code
from distcheck.training.outputs import ModelOutputs, record_outputs
from distcheck.worlds.jobs import Descriptors, Reporter
from distcheck.worlds.rendezvous import enter_world_of_one


def check_loss(case: Case, strategy: LoadedStrategy) -> None:
    """Raise UsageError if a loss contract is requested for a strategy that declares one."""
    promised = strategy.contract.loss
    if promised and strategy.backward is not None:
        raise UsageError(
            f"strategy {case.strategy} promises loss={promised!r} and has its own backward(); "
            "the promise applies to the loss of the training loop's backward; remove one of the two"
        )
    if promised and case.loss not in ("mean", promised):
        raise UsageError(
            f"--loss {case.loss} contradicts the promise loss={promised!r} of {case.strategy}; "
            "remove --loss"
        )
    if case.loss in ("mean", promised):
        return
    if not accepts_loss_option(strategy):
        raise UsageError(
            f"--loss {case.loss} is for code without promises; {case.strategy} promises its "
            "weights and scale, or has its own backward(); remove --loss"
        )


def check_global_sum(case: Case, facts: CaseFacts) -> None:
    """Raise UsageError for a loss that needs the number of tokens on all ranks before backward."""
    if case.loss == "sum/global" and facts.by_tokens:
        raise UsageError(
            f"--loss sum/global is a sum over samples, but the loss of workload {case.workload} "
            "is a mean over tokens; pass --loss tokens if your code divides by the tokens of all "
            "ranks"
        )


def check_without_data(case: Case, strategy: LoadedStrategy) -> None:
    """Raise UsageError for ranks without data if the strategy makes promises about every rank."""
    if not case.adaptation.without_data:
        return
    if strategy.backward is not None or not strategy.contract.is_bare:
        raise UsageError(
            "--without-data is for code without promises that is called after backward; "
            f"{case.strategy} promises how every rank's gradient is synchronized, or has its own "
            "backward(); remove --without-data, or the promise"
        )


def check_mesh(case: Case, contract: Contract) -> None:
    """Raise UsageError for a mesh that does not fit the world, and for incompatible options."""
    try:
        mesh = contract.mesh(case.world)
    except ValueError as error:
        raise UsageError(
            f"strategy {case.strategy}: {error}; change --world or parallel="
        ) from None
    if mesh is None:
        return
    for option, given in (
        ("--accept", case.accept),
        ("--without-data", case.adaptation.without_data),
        ("--loss", case.loss != "mean"),
    ):
        if given:
            raise UsageError(
                f"{option} is for code that replicates the whole model on every rank; "
                f"{case.strategy} "
                f"promises the mesh {mesh}; remove {option}"
            )


def accepts_loss_option(strategy: LoadedStrategy) -> bool:
    """Return True if `--loss` applies, because the strategy promises nothing about its loss."""
    return strategy.backward is None and strategy.contract.observes_loss


_SAMPLES = 8  # samples whose rows are counted: rows selected by value are no multiple
_SAME_ROWS = 1e-2  # Heuristic, relative to their norm: far above rounding; other rows differ more


@INSPECT.does
def inspect_cases(job: InspectionRequest, fds: Descriptors, reporter: Reporter) -> CodeFacts:
    """Load every strategy and workload once. Raises UsageError or CannotRunError for a problem."""
    if why := backends.missing_for(job.cases[0].backend, job.ranks_here):
        raise CannotRunError(why)
    seeds.pin_determinism()
    enter_world_of_one()
    _stand_alone(job.cases)
    known: dict[tuple[str, str, str], CaseFacts] = {}
    facts, looked_at = [], dict[str, CodeInspection]()
    for case in job.cases:
        reporter.progress(0, f"{case.strategy} and {case.workload}")
        with seeds.under(seeds.result_settings()):  # restores settings changed by their file
            strategy = load_strategy(case.strategy, case.adaptation)
            if case.strategy not in looked_at:
                looked_at[case.strategy] = look_at_code(case.strategy, case.adaptation)
        check_loss(case, strategy)
        check_without_data(case, strategy)
        check_mesh(case, strategy.contract)
        acceptance.check_promise(case, strategy.contract)
        trained = trained_with(case.adaptation.form) == case.workload
        key = (case.strategy if trained else "", case.workload, case.dtype)
        if key not in known:
            ingredients = open_ingredients(case, job.description, fds.get("data"))
            seeds.pin_default_dtype(case.dtype)
            known[key] = inspect_workload(ingredients)
            seeds.pin_default_dtype("float32")
        check_global_sum(case, known[key])
        facts.append(
            msgspec.structs.replace(
                known[key],
                **looked_at[case.strategy]._asdict(),
                contract=acceptance.contract_for_case(case, strategy.contract),
                strategy_file=strategy.file,
                takes_loss=accepts_loss_option(strategy),
                strategy_line=strategy.line,
                groups=1 if strategy.contract.one_group else known[key].groups,
                syncs_statistics=_syncs_statistics(strategy.file),
                note=strategy.note,
                refusal=strategy.refusal,
                own_backward=strategy.backward is not None,
                own_update=strategy.update != "loop",
                own_clip=strategy.clip is not None,
            )
        )
    first = job.cases[0]
    devices.enter(first.device, 0)
    seeds.pin_determinism()  # their files have been loaded
    return CodeFacts(environment=environment(first.backend, first.device), cases=tuple(facts))


@WAYS.does
def list_ways(
    job: InspectionRequest, fds: Descriptors, reporter: Reporter
) -> tuple[tuple[Adaptation, ...], ...]:
    """Return the alternative ways to call the single case's strategy."""
    seeds.pin_determinism()
    enter_world_of_one()
    (case,) = job.cases
    _stand_alone(job.cases)
    return other_ways(case.strategy, case.adaptation)


def _stand_alone(cases: Sequence[Case]) -> None:
    """Let code that uses mpi4py be loaded in this process, which is part of no MPI job."""
    uses = any(
        case.backend == "mpi" or matches_in_sources("mpi4py", case.strategy) for case in cases
    )
    if uses and registry.is_installed("mpi"):
        registry.load("mpi").use_single_rank_world()


def _syncs_statistics(file: str) -> bool:
    """Return True if a file's code converts a model's BatchNorm to SyncBatchNorm."""
    try:
        nodes = list(ast.walk(parse_source(Path(file))))
    except (OSError, SyntaxError):
        return False
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return bool(used & {"SyncBatchNorm", "convert_sync_batchnorm"})


def environment(backend: str = "gloo", device: str = "cpu") -> dict[str, Any]:
    """Return versions, machine and settings, as a report records them."""
    return {
        "distcheck": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": cores(),
        "backend": backend,
        "device": device,
        **seeds.describe_settings(),
        **devices.describe(device),
        "libraries": {name: version(name) for name in ("msgspec", "safetensors", "xxhash")},
        "executable": sys.executable,
    }


@EXAMINE.does
def examine(nothing: bytes, fds: Descriptors, reporter: Reporter) -> dict[str, Any]:
    """Return the facts for `distcheck doctor` that need torch."""
    import torch.distributed as dist

    seeds.pin_determinism()
    built = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    cuda = "cuda (built in)" if torch.backends.cuda.is_built() else "no cuda"
    try:
        import torchvision

        vision = f"loads, {torchvision.__version__}"
    except Exception as error:
        vision = f"does not load: {type(error).__name__}: {error}"
    return {
        "environment": environment(),
        "backends": [name for name, there in built.items() if there],
        "nccl": nccl.describe() if built["nccl"] else "",
        "devices": f"cpu, {cuda}; {devices.gpu_count() or 'no'} GPU here",
        "torchvision": vision,
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def inspect_workload(ingredients: Ingredients) -> CaseFacts:
    """Return the facts about a workload, from a forward pass over two samples."""
    saved_bytes = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved_bytes
        if not isinstance(tensor, torch.nn.Parameter):
            saved_bytes += tensor.numel() * tensor.element_size()
        return tensor

    model = ingredients.model()
    _check_statistics(ingredients.case, model)
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    # A workload may change their mode before its first step.
    changes = hasattr(ingredients.loaded.workload, "before_step")
    normalizes = any(changes or m.training or m.running_mean is None for m in norms)
    batch = ingredients.batch(torch.arange(2), 2)
    roundings = _Roundings(model)
    before, libraries_before = torch.get_rng_state(), seeds.library_rng_states()
    saved = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    try:
        with saved, roundings, record_outputs(model, len(batch.ids)) as calls:
            ingredients.loaded.workload.loss(model, batch)
    except Exception:  # theirs, or compiled code that rejects the mode
        with saved, record_outputs(model, len(batch.ids)) as calls:
            ingredients.loaded.workload.loss(model, batch)
    draws = not torch.equal(before, torch.get_rng_state())
    # NumPy may have been imported inside; then its earlier state is unknown.
    draws = draws or not seeds.library_rng_states().startswith(libraries_before)
    frozen = sum(not parameter.requires_grad for parameter in model.parameters())
    layout = describe_model(ingredients, model)
    return CaseFacts(
        contract=Contract(),
        strategy_file="",
        model=layout,
        output=_output(calls),
        makes_groups=ingredients.makes_groups,
        updates_again=update_is_repeatable(ingredients, model, layout),
        train_size=ingredients.samples.size(train=True),
        saved_bytes_per_sample=saved_bytes // 2,
        own_sampler=ingredients.loaded.sampler is not None,
        draws_random_numbers=draws,
        normalizes_batches=normalizes,
        rows_apart=normalizes and _rows_apart(ingredients, model, norms),
        rounds_to=tuple(sorted(roundings.dtypes)),
        training=ingredients.training,
        must_happen=ingredients.must_happen,
        by_tokens=counts_tokens(ingredients.loaded.workload),
        kinds=_module_classes(model),
        groups=_groups(ingredients, model),
        schedule=hasattr(ingredients.loaded.workload, "schedule"),
        frozen=frozen,
        traits=tuple(_model_features(model)),
    )


def _model_features(model: torch.nn.Module) -> Iterator[str]:
    whole = [p for p in model.parameters() if type(p.data) is torch.Tensor and p.numel()]
    if len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters())):
        yield "tied"
    if any(getattr(module, "sparse", None) is True for module in model.modules()):
        yield "sparse"
    if not all(p.is_contiguous() for p in whole):
        yield "not_contiguous"
    if names_sharing_storage(model):
        yield "views"


def _output(calls: ModelOutputs) -> TensorSpec | None:
    rows = calls.rows
    if rows is None or _name(rows.dtype) not in BYTES:
        return None
    return TensorSpec(name=OUTPUTS, shape=tuple(rows.shape[1:]), dtype=_name(rows.dtype))


def _module_classes(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the classes of the modules that directly hold parameters or buffers."""
    found = {
        type(module).__name__
        for module in model.modules()
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    }
    return tuple(sorted(found))


def _groups(ingredients: Ingredients, model: torch.nn.Module) -> int:
    """Return the number of param groups of the workload's optimizer; custom ones may have none."""
    optimizer = ingredients.optimizer(model.parameters())
    return len(getattr(optimizer, "param_groups", ())) or 1


def _check_statistics(case: Case, model: torch.nn.Module) -> None:
    """Raise UsageError for a forward pass that needs other ranks."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm) and module.training:
            raise UsageError(
                f"workload {case.workload}: {name or 'its model'} is a SyncBatchNorm, which "
                "synchronizes statistics in the forward pass, so the local gradients cannot be "
                "recomputed for comparison; use BatchNorm in the model"
            )


class _Roundings(TorchDispatchMode):
    """Records the floating-point dtypes of parameters, and those that operations round to. An
    autocast for a GPU rounds nothing here, but is recorded.
    """

    supports_higher_order_operators = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes = {_name(p.dtype) for p in model.parameters() if _eps(p) > 0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        finest = min((eps for eps in map(_eps, given) if eps > 0), default=1.0)
        found = func(*args, **(kwargs or {}))
        made = (leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
        self.dtypes.update(_name(tensor.dtype) for tensor in made if _eps(tensor) > finest)
        if torch.is_autocast_enabled("cuda"):
            self.dtypes.add(_name(torch.get_autocast_dtype("cuda")))
        return found


def _eps(tensor: torch.Tensor) -> float:
    """Return the relative spacing of a dtype; 0 if it is not floating-point."""
    floating = tensor.is_floating_point() or tensor.is_complex()
    return spacing(tensor.dtype) if floating else 0.0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rows_seen(
    ingredients: Ingredients, model: torch.nn.Module, norms: Sequence[BatchNorm], samples: int
) -> list[torch.Tensor]:
    """Return the inputs of each BatchNorm call in a forward pass over the first samples."""
    seen: list[torch.Tensor] = []

    def note(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((*args, *kwargs.values())[0].detach().clone())

    hooks = [norm.register_forward_pre_hook(note, with_kwargs=True) for norm in norms]
    try:
        batch = ingredients.batch(torch.arange(samples), samples)
        ingredients.loaded.workload.loss(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _rows_apart(
    ingredients: Ingredients, model: torch.nn.Module, norms: Sequence[BatchNorm]
) -> bool:
    """Return True if BatchNorm receives rows whose samples are unknown.

    There may be several per sample: then all samples have the same number, the first sample's come
    first, and equal those of a batch with only that sample (in eval mode, in which rows are
    independent).
    """
    samples = min(_SAMPLES, ingredients.samples.size(train=True))
    if all(len(rows) == samples for rows in _rows_seen(ingredients, model, norms, samples)):
        return False
    model.eval()
    try:
        several, alone = (_rows_seen(ingredients, model, norms, count) for count in (samples, 1))
    except Exception:  # theirs: it may not support one sample, or another mode
        return True
    if [len(rows) for rows in several] != [samples * len(rows) for rows in alone]:
        return True
    firsts = [rows[: len(rows) // samples] for rows in several]
    return any(
        float((first - rows).norm()) > _SAME_ROWS * float(rows.norm())
        for first, rows in zip(firsts, alone, strict=True)
    )
