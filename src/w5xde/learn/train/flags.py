"""The flags of a model that decide how it computes: which parameters are frozen, and which modules evaluate.

The caller of a pool sets them on its own model, as in any script (`requires_grad_`, `train`, `eval`); they
travel as bits, and a node sets them alike. Knows no losses and no calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from w5xde.messages import FROZEN, TRAINED, Layout


class ModelFlags:
    """Reads and writes the flags of one model; parameters are those of the layout that are trained."""

    def __init__(self, module: nn.Module, trained: Sequence[Tensor]) -> None:
        self._modules = list(module.modules())
        self._trained = trained

    @property
    def modules(self) -> list[nn.Module]:
        return self._modules

    def frozen(self) -> bytes:
        """A bit for each trained parameter that requires no gradient now."""
        return to_bits([not parameter.requires_grad for parameter in self._trained])

    def evaluating(self) -> bytes:
        """A bit for each module that is in evaluation mode."""
        return to_bits([not module.training for module in self._modules])

    def set(self, frozen: bytes, evaluating: bytes) -> None:
        """Set all flags; ValueError if there are bits for more parameters or modules than there are."""
        of_parameters = from_bits(frozen, len(self._trained))
        of_modules = from_bits(evaluating, len(self._modules))
        for parameter, is_frozen in zip(self._trained, of_parameters, strict=True):
            parameter.requires_grad_(not is_frozen)
        for module, is_evaluating in zip(self._modules, of_modules, strict=True):
            # Not by `train()`, which modules may override, and which sets their children too.
            module.training = not is_evaluating


def adopt_roles(module: nn.Module, layout: Layout) -> None:
    """Let those parameters require gradients that the layout calls trained, and no others."""
    roles = {entry.name: entry.role for entry in layout.entries if entry.role in (TRAINED, FROZEN)}
    for name, parameter in module.named_parameters():
        if name in roles:
            parameter.requires_grad_(roles[name] == TRAINED)


def to_bits(flags: Sequence[bool]) -> bytes:
    """Flags as bytes, the first in the lowest bit; without zeros at the end."""
    number = sum([1 << place for place, flag in enumerate(flags) if flag])
    return number.to_bytes((number.bit_length() + 7) // 8, "little")


def from_bits(bits: bytes, count: int) -> list[bool]:
    """The flags in these bytes, `count` of them; ValueError if a bit beyond them is set."""
    number = int.from_bytes(bits, "little")
    if number >> count:
        raise ValueError(f"bits for more than {count} flags")
    return [bool(number >> place & 1) for place in range(count)]
