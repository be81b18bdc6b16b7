"""The units of a run, with a comment for each choice. Refuses nothing: `command.py` does."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from w5xde.deploy.request import DeployRequest

# A coordinator ends in order within 20 s of SIGTERM, a node sooner; this leaves room for a slow disk.
STOP_SECONDS = 60
# How long a ticket admits new machines. One that has joined comes back with a credential of its own.
LIFETIME = "30d"
# The files of an identity folder, and the ticket beside them.
IDENTITY_FILES = ("identity.pem", "offline-tickets.json")
TICKET = "ticket"
# What a word of a command may hold without quotes.
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./~-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUnits:
    """What the user chose for the units of a run."""

    request: DeployRequest
    # The path of w5xde.
    command: str
    host: str
    port: int
    # Where the coordinator runs: there lie the job and perhaps w5xde.toml.
    folder: str
    # Folders that the sandbox would hide, for the coordinator and for nodes.
    visible: tuple[str, ...]
    node_visible: tuple[str, ...]
    # The code that nodes agree to; None: the job is a package that is installed on every machine.
    code_sha256: str | None
    uses_gpus: bool

    @property
    def name(self) -> str:
        """The name of the coordinator's unit."""
        return f"w5xde-{self.request.run}"

    @property
    def secrets(self) -> str:
        """The folder with identity and ticket, which only root can read."""
        return f"/etc/w5xde/{self.request.run}"


def exec_line(words: Sequence[str]) -> str:
    """A command as ExecStart= has it; specifiers such as %d have to be there already."""
    return " ".join(_word(word) for word in words)


def _word(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    # What is left of these would end the line.
    escaped = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in escaped)
    return f'"{escaped}"'


def literal(text: str) -> str:
    """A text in which systemd finds no specifiers."""
    return text.replace("%", "%%")


def ticket_command(units: RunUnits) -> list[str]:
    """The command that makes the coordinator's identity and the nodes' ticket."""
    where = ["--advertise", units.host, "--port", str(units.port), "--lifetime", LIFETIME, "--uses", "any"]
    made = ["--identity", units.secrets, *where, "--out", f"{units.secrets}/{TICKET}"]
    return [units.command, "ticket", "new", "--offline", *made]


def coordinator_unit(units: RunUnits) -> str:
    """The unit for the machine with the data."""
    place = ["--host", "0.0.0.0", "--port", str(units.port), "--advertise", units.host]
    known = ["--identity", "%d", "--ticket", f"@%d/{TICKET}"]
    request = units.request
    fixed = DeployRequest(request.job, request.run, tuple(map(literal, request.flags)))
    words = fixed.serve_words(literal(request.job.place), f"%S/{units.name}", *place, *known)
    credentials = "\n".join(
        f"LoadCredential={name}:{units.secrets}/{name}" for name in (*IDENTITY_FILES, TICKET)
    )
    return f"""\
# The coordinator of run {request.run}, job {request.job.reference}. Written by  w5xde deploy systemd
#
# On the machine with the data, once:
#   sudo {shlex.join(ticket_command(units))}
#   sudo cp {units.name}.service /etc/systemd/system/
#   sudo systemctl enable --now {units.name}
# See how it goes:         journalctl -fu {units.name}
# When the run is over:    sudo {units.command} export {request.run} --runs /var/lib/{units.name}
# Remove it:               sudo systemctl disable --now {units.name}; the run stays in /var/lib/{units.name}

[Unit]
Description=WIIIIIDE run {request.run}: the coordinator
Wants=network-online.target
After=network-online.target
# Never give up restarting: what helps nothing to start again is told by exit codes, below.
StartLimitIntervalSec=0

[Service]
Type=exec
# The same command is right for the first start, after a crash and after a reboot: --resume auto goes on with
# the run, and ends at once with 0 if it is complete.
ExecStart={exec_line([literal(units.command), *words[1:]])}
WorkingDirectory={literal(units.folder)}
{_restarts("2 20 30 40", "A mistake in the command, the job or the folder; or training cannot go on")}

# The run: checkpoints, ledger and weights, in /var/lib/{units.name}.
StateDirectory={units.name}
StateDirectoryMode=0700
{_environment(units.name)}
# Read by systemd as root, and shown to this unit alone, in the folder %d.
{credentials}
{_sandbox(units, units.visible)}
[Install]
WantedBy=multi-user.target
"""


def node_unit(units: RunUnits) -> str:
    """The unit for every machine that computes."""
    run, name = units.request.run, f"{units.name}-node"
    if units.code_sha256 is not None:
        # No copy of the job is needed, and no other code than the one that is deployed now is ever run.
        job = ["--accept-code", units.code_sha256]
    else:
        job = [literal(units.request.job.reference)]
    words = [literal(units.command), "join", f"@%d/{TICKET}", *job, "--wait", "forever"]
    return f"""\
# A node of run {run}, job {units.request.job.reference}. Written by  w5xde deploy systemd
#
# On every machine that computes, with the ticket from {units.secrets}/{TICKET} of the coordinator's, once:
#   sudo install -D -m 0600 {TICKET} {units.secrets}/{TICKET}
#   sudo cp {name}.service /etc/systemd/system/
#   sudo systemctl enable --now {name}
# See how it goes:   journalctl -fu {name}
# Remove it:         sudo systemctl disable --now {name}

[Unit]
Description=WIIIIIDE run {run}: a node for each core or GPU of this machine
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0
# A run that is over is not waited for after the next reboot; see ExecStopPost.
ConditionPathExists=!%S/{name}/over

[Service]
Type=exec
# The code of the job comes from the coordinator, and runs only if it has this hash.
ExecStart={exec_line(words)}
ExecStopPost=/bin/sh -c 'test "$$EXIT_STATUS" != 0 || touch "$$STATE_DIRECTORY/over"'
{_restarts("2 20 40", "A mistake in the command, the job or the folder")}

# The credential with which this machine comes back when the ticket has expired, and samples that it keeps.
StateDirectory={name}
StateDirectoryMode=0700
CacheDirectory={name}
{_environment(name)}
Environment=W5XDE_CACHE=%C/{name}/samples
LoadCredential={TICKET}:{units.secrets}/{TICKET}
{_sandbox(units, units.node_visible)}
[Install]
WantedBy=multi-user.target
"""


def _restarts(mistakes: str, what: str) -> str:
    return f"""
# 0 is the end of the run. After a crash, start again.
Restart=on-failure
RestartSec=5
# 75: stopped in order before the run was over. After  systemctl stop  that is no failure; else start again.
SuccessExitStatus=75
RestartForceExitStatus=75
# {what}: starting again would not help.
RestartPreventExitStatus={mistakes}
# SIGTERM goes to the command, which ends its own processes in order; SIGKILL to all that are left.
KillMode=mixed
TimeoutStopSec={STOP_SECONDS}"""


def _environment(name: str) -> str:
    return f"""\
Environment=W5XDE_STATE=%S/{name}/state HOME=%S/{name}
# Lines appear in the journal when they are printed.
Environment=PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1"""


def _sandbox(units: RunUnits, visible: Sequence[str]) -> str:
    devices = "PrivateDevices=yes"
    if units.uses_gpus:
        devices = "# GPUs: their devices and no others.\nDevicePolicy=closed\nDeviceAllow=char-nvidia* rw"
    shown = ""
    if visible:
        shown = "# Shown nevertheless, for reading: the job, its data, and w5xde, as far as they lie there.\n"
        shown += "".join(f"BindReadOnlyPaths=-{literal(each)}\n" for each in visible)
    return f"""
# A user of its own, who exists while the unit runs and owns nothing else.
DynamicUser=yes
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
PrivateUsers=yes
# Everything is read-only but the folders above; home directories and others' temporary files are hidden.
ProtectSystem=strict
ProtectHome=tmpfs
PrivateTmp=yes
PrivateMounts=yes
{shown}{devices}
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
# Not ProcSubset=pid: torch looks for the kind of processor in /proc/cpuinfo.
ProtectProc=invisible
# TCP, sockets between its own processes, and the list of the machine's addresses.
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RemoveIPC=yes
LockPersonality=yes
# Not MemoryDenyWriteExecute=yes: torch's kernels for matrices are written at run time.
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
"""
