"""Data sets: two small ones that every machine has, and `mapped`, for files of your own.

The digits ship with this package, the text with Python: the demo and the examples use them, and so need no
download. Each function returns something for the `data` of a job. torch and numpy are imported inside
functions, so that importing w5xde stays light.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from w5xde.datasets.mapped import mapped

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

__all__ = ["digits", "mapped", "python_docs"]

# The first 1,437 of the 1,797 digits (four fifths) are for training, the other 360 for testing. The file
# is stored shuffled, so that the split does not depend on any library's random numbers.
_DIGITS_TRAIN = 1437
_DIGITS_PIXEL_MAX = 16


def digits(split: str = "train") -> TensorDataset:
    """Handwritten digits: images as float32 [n, 64] from 0 to 1, labels as int64.

    `split` is "train" (1,437 digits) or "test" (360 others by the same writers).
    """
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    rows = {"train": slice(None, _DIGITS_TRAIN), "test": slice(_DIGITS_TRAIN, None)}.get(split)
    if rows is None:
        raise ValueError(f"the digits have no split {split!r}: ask for 'train' or 'test'")
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        images = torch.from_numpy(stored["images"][rows]).float() / _DIGITS_PIXEL_MAX
        labels = torch.from_numpy(stored["labels"][rows]).long()
    return TensorDataset(images, labels)


def python_docs() -> str:
    """The language reference that `help()` shows: one text of about 460,000 characters, sorted by topic.

    It is the text of the Python that runs, so machines with another Python have slightly another text:
    stream the batches from one coordinator (the default), or use the same Python everywhere.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[topic] for topic in sorted(topics))
