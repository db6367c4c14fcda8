"""Running explored cases: in kept ranks while these are to be trusted, in fresh ones to be sure."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from distcheck.contract import Contract
from distcheck.errors import CannotRunError
from distcheck.explore.kept import KeptRanks
from distcheck.explore.messages import Sitting
from distcheck.plan.declined import declined_words, words_in
from distcheck.records import Adaptation, Case, CaseReport
from distcheck.records.generated_words import EXPLORED_DTYPES
from distcheck.verification import preparation
from distcheck.verification.preparation import Data
from distcheck.verification.run import run_cases
from distcheck.worlds.pool import Pool


class Runner:
    """Cases to reports. What is known of the strategy is found out once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept = KeptRanks(pool)
        self._contracts: dict[Adaptation, Contract] = {}
        self._files: dict[Adaptation, str] = {}
        self._declined: dict[Adaptation, dict[str, str]] = {}
        self._calibrated: dict[tuple[int, Contract], str] = {}
        self.distrusts_kept = ""  # why ranks are not kept any more

    def look_at(self, samples: Sequence[Case]) -> None:
        """Loads the strategy, with each adaptation that `samples` have. Raises UsageError or
        CannotRunError.
        """
        facts = preparation.inspect(self._pool, samples, Data())
        for case, about in zip(samples, facts.cases, strict=True):
            contract = about.contract
            if contract.parallel:
                raise CannotRunError(
                    f"{case.strategy} promises a mesh, and divides the layers of the models that "
                    "it was written for; explore searches among other models"
                )
            if contract.backend not in (None, "gloo") or contract.device not in (None, "cpu"):
                raise CannotRunError(
                    f"strategy {case.strategy} works only on "
                    f"{contract.backend or contract.device}; explore searches with gloo on the "
                    "CPU; use distcheck verify"
                )
            self._contracts[case.adaptation] = contract
            self._files[case.adaptation] = about.strategy_file
            self._declined[case.adaptation] = declined_words(
                contract, own_backward=about.own_backward, own_update=about.own_update
            )

    @property
    def left_out(self) -> dict[str, str]:
        """The words that no case can have, each with the reason: of any adaptation that was looked
        at, the first.
        """
        found: dict[str, str] = {}
        for declined in self._declined.values():
            found = declined | found
        return found

    def why_left_out(self, case: Case) -> str:
        """Why a case is not to be run with this strategy, as it is now; empty where it may be."""
        words = words_in(case.workload)
        if words and case.adaptation not in self._declined:
            self.look_at([case])
        declined = self._declined.get(case.adaptation, {})
        return next((why for word, why in declined.items() if word in words), "")

    def run(self, case: Case) -> CaseReport:
        """One case, in kept ranks if they are to be trusted."""
        return next(self.run_many([case]))

    def run_many(self, cases: Iterable[Case]) -> Iterator[CaseReport]:
        """Cases, in order; the caller may leave the rest."""
        if self.distrusts_kept:
            yield from map(self.run_fresh, cases)
            return
        for report in self._kept.run(map(self._sitting, cases)):
            file = self._files[report.case.adaptation]
            yield msgspec.structs.replace(report, strategy_file=file)

    def _sitting(self, case: Case) -> Sitting:
        if case.adaptation not in self._contracts:
            self.look_at([case])
        contract = self._contracts[case.adaptation]
        failure = self._calibration_failure(case, contract)
        return Sitting(case=case, contract=contract, calibration_failure=failure)

    def run_fresh(self, case: Case) -> CaseReport:
        """The case, as `distcheck replay` runs it."""
        return self.replay(case, 1)[0]

    def replay(self, case: Case, times: int) -> list[CaseReport]:
        """The case in fresh ranks, several times: each a run by itself, since what follows a hang
        in one run is left out.
        """
        alike = [msgspec.structs.replace(case, id=f"{case.id}-{n}") for n in range(times)]
        reports = [report for one in alike for report in run_cases([one], self._pool).cases]
        return [msgspec.structs.replace(report, case=case) for report in reports]

    def train(self, case: Case) -> None:
        """Trains a case in kept ranks, and neither records nor judges it."""
        self._kept.train(case)

    def close(self) -> None:
        """Ends the kept ranks."""
        self._kept.close()

    def _calibration_failure(self, case: Case, contract: Contract) -> str:
        key = (case.world, contract)
        if key not in self._calibrated:
            found = ""
            if case.world > 1 and isinstance(contract.order, preparation.TO_CONFIRM):
                found = preparation.calibrate(
                    self._pool,
                    backend=case.backend,
                    world=case.world,
                    orders=(contract.order,),
                    dtypes=(contract.wire,) if contract.wire else EXPLORED_DTYPES,
                    deadline_s=max(case.deadline_s, 30.0),
                ).failure(contract)
            self._calibrated[key] = found
        return self._calibrated[key]
