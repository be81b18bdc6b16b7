"""`python -m w5xde.explanations > docs/errors.md`."""

import sys

from w5xde.explanations import document

sys.stdout.write(document())
