"""`python -m w5xde`."""

import sys

from w5xde.cli import main

sys.exit(main())
