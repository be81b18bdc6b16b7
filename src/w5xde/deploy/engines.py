"""The engines that `w5xde deploy` writes files for, by the names that users type."""

from __future__ import annotations

from w5xde.deploy.engine import Engine
from w5xde.deploy.kubernetes.command import KUBERNETES
from w5xde.deploy.slurm.command import SLURM
from w5xde.deploy.systemd.command import SYSTEMD

ENGINES: dict[str, Engine] = {"slurm": SLURM, "k8s": KUBERNETES, "systemd": SYSTEMD}
