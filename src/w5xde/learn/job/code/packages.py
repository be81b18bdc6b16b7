"""What a job's files import, and the versions with which they run: of Python, the CPU, torch and packages.

Imports are read from the syntax of the files: nothing is imported here, and nothing is ever installed. Two
machines whose versions differ may compute other bits; that is said, and refuses nobody. Knows no nodes.
"""

from __future__ import annotations

import ast
import importlib.util
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata

from w5xde.message_types import MODULE_PATTERN, PACKAGE_PATTERN, PACKAGES_MAX, VERSION_PATTERN

# Every job runs with these, whatever its files import.
_ALWAYS = ("torch", "numpy")
_KNOWN = {"w5xde", *_ALWAYS}
PYTHON, CPU = "Python", "CPU"
# A node names at most this many of its versions that differ, so that its message stays short.
DIFFERENCES_MAX = 16


def imported_modules(sources: Iterable[bytes]) -> list[str]:
    """The modules that these files import, also inside functions, by the first part of their names.

    Without those of Python itself, w5xde, torch and numpy, which are always there.
    """
    found = {name for source in sources for name in _imports(source)}
    return sorted(filter(re.compile(MODULE_PATTERN).match, found - sys.stdlib_module_names - _KNOWN))


def _imports(source: bytes) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # whoever runs it will hear why
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def is_importable(module: str) -> bool:
    """Whether there is a module of this name here, without a dot; looks for it and does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def packages_of(modules: Iterable[str]) -> dict[str, str]:
    """The package to which each of these modules belongs, by the name under which it is installed.

    It is empty for a module of no package. Modules that are not here are left out.
    """
    here = [module for module in modules if is_importable(module)]
    # Reads the descriptions of all packages, which takes a tenth of a second.
    owners = metadata.packages_distributions() if here else {}
    named = ((module, (owners.get(module) or [""])[0]) for module in here)
    return {module: package if re.match(PACKAGE_PATTERN, package) else "" for module, package in named}


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of these packages, and of what every job runs with."""
    versions = {PYTHON: f"{sys.version_info.major}.{sys.version_info.minor}", CPU: _cpu()}
    for package in dict.fromkeys([*_ALWAYS, *packages]):
        try:
            versions[package] = metadata.version(package)
        except (metadata.PackageNotFoundError, ValueError):
            continue
    sayable = [
        (name, version)
        for name, version in versions.items()
        if re.match(PACKAGE_PATTERN, name) and re.match(VERSION_PATTERN, version)
    ]
    return dict(sayable[:PACKAGES_MAX])


def versions_for(sources: Iterable[bytes]) -> dict[str, str]:
    """The versions with which these files run here."""
    return versions_of(filter(None, packages_of(imported_modules(sources)).values()))


def _cpu() -> str:
    """The kind of CPU, as far as torch chooses its kernels by it."""
    import torch

    return f"{platform.machine() or 'unknown'}-{torch.backends.cpu.get_cpu_capability()}"


def differences(own: Mapping[str, str], theirs: Mapping[str, str], device: str) -> dict[str, str]:
    """Those of our versions that are not the other side's; `device` is the kind on which we compute."""
    found = {name: version for name, version in own.items() if theirs.get(name, version) != version}
    if device != "cpu":
        found.pop(CPU, None)
    return dict(list(found.items())[:DIFFERENCES_MAX])


def differences_text(found: Mapping[str, str], others: Mapping[str, str], where: str) -> str:
    """Each version that differs, and what the others have: `torch 2.13.0 (there 2.12.1)`."""
    return ", ".join(f"{name} {version} ({where} {others.get(name, '?')})" for name, version in found.items())
