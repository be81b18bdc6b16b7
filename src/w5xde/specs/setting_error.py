"""The error of a setting that brings its own advice. Knows no settings."""

from __future__ import annotations


class SettingError(ValueError):
    """A setting makes no sense, alone or beside another; `fix` says what to do."""

    def __init__(self, what: str, *, fix: str) -> None:
        super().__init__(what)
        self.fix = fix
