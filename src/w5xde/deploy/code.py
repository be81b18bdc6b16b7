"""The code of a deployed job: the files that travel with it. Runs none of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from w5xde.deploy.request import DeployRequest
from w5xde.errors import JobError

if TYPE_CHECKING:
    from w5xde.learn.job.code.bundle import CodeBundle


def code_of_job(request: DeployRequest) -> CodeBundle | None:
    """The job file and the modules that --ship names; None if the job is a module that is installed."""
    file = request.job.file
    if file is None:
        return None
    # These load torch, which help must not.
    from w5xde.learn.job.code.bundle import BadCode
    from w5xde.learn.job.code.offer import OFF, collect_code, left_behind

    ship = None if request.ship == OFF else request.ship
    try:
        code = collect_code(file, request.job.name, ship)
    except (BadCode, OSError) as error:
        raise JobError(
            f"the code of {request.job.reference} cannot travel: {error}",
            code="W5-630",
            fix="mend that, or install the job as a package and name it as  package.module:job",
        ) from error
    if missing := left_behind(file, code):
        names = ",".join([*filter(None, [ship]), *missing])
        raise JobError(
            f"{request.job.reference} imports {' and '.join(missing)}, which would not be there",
            code="W5-637",
            why="only the job file itself travels, and what --ship names",
            fix=f"w5xde deploy … -- --ship {names}",
        )
    return code
