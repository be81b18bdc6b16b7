"""Jobs of Lightning and Hugging Face, compared with what the frameworks' own loops train."""

import os
import warnings

# Nothing here may look for models or data in the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    # What the frameworks warn of while they are loaded is not about this program.
    warnings.simplefilter("ignore")
    import lightning.pytorch
    import pytorch_lightning
    from transformers import Trainer

__all__ = ["Trainer", "lightning", "pytorch_lightning"]
