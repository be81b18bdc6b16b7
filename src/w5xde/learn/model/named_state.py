"""The state dict of a model, made from the bytes of one of its versions. Knows nothing of training."""

from __future__ import annotations

import torch
from torch import Tensor

from w5xde.learn.model.layout import FlatModel


class NamedState:
    """Finds the tensors of a state dict in the bytes of a version."""

    def __init__(self, flat: FlatModel) -> None:
        self._module = flat.module
        self._blueprint = flat.blueprint
        entry_of = {id(tensor): entry for entry, tensor in enumerate(flat.tensors)}
        state = {
            name: each
            for name, each in flat.module.state_dict(keep_vars=True).items()
            if isinstance(each, Tensor)
        }
        # In the order of the state dict. A tensor that has two names is one entry.
        self._entries = {name: entry_of.get(id(each)) for name, each in state.items()}

    def others(self) -> dict[str, Tensor]:
        """Copies of tensors that are in the state dict alone, because a hook of the module makes them."""
        if None not in self._entries.values():
            return {}
        state = self._module.state_dict()
        names = [name for name, entry in self._entries.items() if entry is None]
        return {name: state[name].detach().to("cpu", copy=True) for name in names}

    def tensors(self, raw: bytearray | memoryview, others: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of a whole version, as views of its bytes; with `others` of the same version."""
        whole = torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else torch.empty(0, dtype=torch.uint8)
        return {
            name: others[name] if entry is None else self._blueprint.entries_in(whole, [entry])[0]
            for name, entry in self._entries.items()
        }
