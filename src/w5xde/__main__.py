"""`python -m w5xde`, and the command `w5xde`: hears SIGTERM before it loads anything else."""

import os
import sys
from typing import NoReturn

from w5xde.runtime.system.termination import NOT_OVER, Termination, is_running


def run() -> NoReturn:
    """The entry point of the process."""
    try:
        termination = Termination() if is_running(sys.argv[1:]) else None
        from w5xde.cli import main
    except KeyboardInterrupt:
        os._exit(NOT_OVER)
    main.run(termination)


if __name__ == "__main__":
    run()
