"""What a ledger says of weights: which were saved as a model, and which were measured. Both must exist.

Knows no leases, epochs or checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

from w5xde.control.audit.findings import Findings
from w5xde.control.audit.records import Record, whole


class WeightsCheck:
    """Checks records that name weights by their step; passes each violation to `wrong`.

    `steps` says how many steps are recorded so far.
    """

    def __init__(self, wrong: Callable[[str], None], found: Findings, steps: Callable[[], int]) -> None:
        self._wrong = wrong
        self._found = found
        self._steps = steps

    def saved(self, record: Record) -> None:
        """A model was saved."""
        self._found.models[str(record["sha256"])] = self._made(record["version"], "saves a model")

    def kept_as_best(self, record: Record) -> None:
        """The weights of an evaluation were kept as the best."""
        self._found.best[str(record["sha256"])] = self._made(record["version"], "keeps the model")

    def measured(self, record: Record) -> None:
        """The model was evaluated. Earlier versions did not record which weights that measured."""
        self._made(record.get("step", 0), "measures the model")

    def rate_changed(self, record: Record) -> None:
        """A user changed the learning rate, for the steps from here on."""
        version, recorded = whole(record["version"]), self._steps()
        if version != recorded:
            self._wrong(f"changes the learning rate after step {version}, but {recorded} are recorded")

    def _made(self, step: object, what: str) -> int:
        """Return the number of a step, which must have been made."""
        made, recorded = whole(step), self._steps()
        if made > recorded:
            self._wrong(f"{what} of step {made}, but only {recorded} steps are recorded")
        return made
