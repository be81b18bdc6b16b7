"""`python -m w5xde.chaos`: the soak."""

import sys

from w5xde.chaos.soak import main

sys.exit(main())
