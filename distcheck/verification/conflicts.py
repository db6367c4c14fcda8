"""Options, promises and workloads that do not go together; each is refused with one sentence."""

from distcheck.contract import Contract
from distcheck.errors import UsageError
from distcheck.records import Case
from distcheck.training.jobs import CaseFacts
from distcheck.training.loaded import LoadedStrategy


def check_loss(case: Case, strategy: LoadedStrategy) -> None:
    """Raises UsageError for a loss contract beside a strategy that has its own."""
    promised = strategy.contract.loss
    if promised and strategy.backward is not None:
        raise UsageError(
            f"strategy {case.strategy} promises loss={promised!r} and has its own backward(); the "
            "promise says what the training loop's backward gets; remove one of the two"
        )
    if promised and case.loss not in ("mean", promised):
        raise UsageError(
            f"--loss {case.loss} contradicts the promise loss={promised!r} of {case.strategy}; "
            "remove --loss"
        )
    if case.loss in ("mean", promised):
        return
    if not takes_loss(strategy):
        raise UsageError(
            f"--loss {case.loss} is for code without promises; {case.strategy} promises how it "
            "weights and scales, or has its own backward(); leave --loss at mean"
        )


def check_global_sum(case: Case, facts: CaseFacts) -> None:
    """Raises UsageError for a loss that needs the tokens of all ranks before backward."""
    if case.loss == "sum/global" and facts.by_tokens:
        raise UsageError(
            f"--loss sum/global counts samples, and workload {case.workload} counts tokens; give "
            "--loss tokens, for code that divides by the tokens of all ranks itself"
        )


def check_without_data(case: Case, strategy: LoadedStrategy) -> None:
    """Raises UsageError for ranks without data beside a promise of what every rank gives."""
    if not case.adaptation.without_data:
        return
    if strategy.backward is not None or not strategy.contract.is_bare:
        raise UsageError(
            "--without-data is for code without promises that is called after backward; "
            f"{case.strategy} promises how every rank's gradient is exchanged, or has its own "
            "backward(); remove --without-data, or the promise"
        )


def check_mesh(case: Case, contract: Contract) -> None:
    """Raises UsageError for a mesh that does not fit the world, and what does not go with one."""
    try:
        mesh = contract.mesh(case.world)
    except ValueError as error:
        raise UsageError(
            f"strategy {case.strategy}: {error}; give another --world, or another parallel="
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
                f"{option} is for code in which every rank has the whole model; {case.strategy} "
                f"promises the mesh {mesh}; remove {option}"
            )


def takes_loss(strategy: LoadedStrategy) -> bool:
    """Whether `--loss` says what backward gets: it promises nothing of that."""
    return strategy.backward is None and strategy.contract.observes_loss
