"""A private Slurm: munged, slurmctld and several slurmd on this machine, with all their files in one folder.

To Slurm each slurmd is a host, so jobs can move and hosts can die. Nothing here knows w5xde.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

HOSTS = ("a", "b", "c")
CPUS = 1
# Longer than anything here takes on a busy machine; a test that waits so long has failed.
PATIENCE_SECONDS = 110.0
# How often a test asks Slurm; an answer takes a few milliseconds.
LOOK_SECONDS = 0.2
# What Slurm grants between SIGTERM and SIGKILL, after scancel and in a preemption; w5xde needs at most 20.
GRACE_SECONDS = 40

# cred_expire: a requeued job waits so long (120 s by default); `Slurm.hurry` does not wait for it.
# SlurmdTimeout: after so long a silent host is down, and its jobs are requeued.
# config_overrides: the CPUs of the hosts are claimed, this machine need not have them.
_CONFIGURATION = """\
ClusterName=w5test
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=30
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
KillWait={grace}
SlurmdTimeout=20
MinJobAge=3600
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{hosts}
PartitionName=preempt Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL PriorityTier=10
"""
_HOST = "NodeName={name} NodeHostname={machine} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000"


def wait_until(is_so: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Return once the condition holds; fail with the second function's text if it never does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(LOOK_SECONDS)


class Slurm:
    """A Slurm that runs. Jobs are named by the words that Slurm uses: `17`, or `17_2` for an element."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Debian puts daemons into folders that are not in every user's PATH.
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        self.variables = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
        self.user = getpass.getuser()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    # --- daemons ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all daemons; return when every host can take jobs."""
        self._configure()
        key, log = self.folder / "munge.key", self.folder / "munge.log"
        self.run("mungekey", "--create", f"--keyfile={key}")
        kept = [f"--{what}-file={self.folder / f'munge.{what}'}" for what in ("pid", "seed")]
        place = [f"--key-file={key}", f"--log-file={log}", f"--socket={self.folder / 'munge.socket'}"]
        self._start_daemon("munged", "--foreground", *place, *kept)
        wait_until((self.folder / "munge.socket").exists, self.logs)
        self._start_daemon("slurmctld", "-D")
        for host in HOSTS:
            self.start_host(host)
        wait_until(lambda: self._states_of_hosts() == {"idle"}, self.logs)

    def _configure(self) -> None:
        (self.folder / "state").mkdir()
        machine, ports = socket.gethostname().partition(".")[0], _free_ports(1 + len(HOSTS))
        hosts = [
            _HOST.format(name=name, machine=machine, port=port, cpus=CPUS)
            for name, port in zip(HOSTS, ports[1:], strict=True)
        ]
        text = _CONFIGURATION.format(
            machine=machine,
            port=ports[0],
            user=self.user,
            folder=self.folder,
            grace=GRACE_SECONDS,
            hosts="\n".join(hosts),
        )
        (self.folder / "slurm.conf").write_text(text)

    def _start_daemon(self, name: str, *words: str, host: str = "") -> None:
        with (self.folder / f"{name}{host}.out").open("ab") as output:
            # The host's name is in the environment of its slurmd and of all that this starts.
            self._daemons[f"{name}{host}"] = subprocess.Popen(
                [name, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.variables, "SLURMD_NODENAME": host},
            )

    def start_host(self, host: str) -> None:
        self._start_daemon("slurmd", "-N", host, "-D", host=host)

    def kill_host(self, host: str) -> None:
        """Kill a host's daemon and all jobs on it, as if it had lost its power."""
        slurmd = self._daemons.pop(f"slurmd{host}")
        tasks = [each for each in self._tasks() if _variable(each, "SLURMD_NODENAME") == host]
        # All at once: no task may see the others die, and nobody may tell slurmctld of it.
        for each in tasks:
            with suppress(psutil.NoSuchProcess):
                each.suspend()
        self._kill(self._minders(host))
        slurmd.kill()
        slurmd.wait()
        self._kill(tasks)

    def _states_of_hosts(self) -> set[str]:
        return set(self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).split())

    def wait_until_idle(self) -> None:
        """Wait until every host is up and has no job."""
        wait_until(
            lambda: self._states_of_hosts() == {"idle"}, lambda: f"{self.run('sinfo', '-Nl')}{self.queue()}"
        )

    def close(self) -> None:
        """Stop the daemons and whatever their jobs have left."""
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._kill(self.processes())

    def processes(self) -> list[psutil.Process]:
        """The processes of all jobs, and Slurm's own that mind them; not the daemons."""
        return [*self._minders("*"), *self._tasks()]

    def _tasks(self) -> list[psutil.Process]:
        daemons = {daemon.pid for daemon in self._daemons.values()} | {os.getpid()}
        configuration = self.variables["SLURM_CONF"]
        return [
            each
            for each in psutil.process_iter()
            if each.pid not in daemons and _variable(each, "SLURM_CONF") == configuration
        ]

    def _minders(self, host: str) -> list[psutil.Process]:
        """The processes that mind jobs: they have no environment, and write to the log of their host."""
        logs = {str(each) for each in self.folder.glob(f"slurmd-{host}.log")}
        return [
            each
            for each in psutil.process_iter(["name"])
            if each.info["name"] == "slurmstepd" and logs & _open_files(each)
        ]

    @staticmethod
    def _kill(processes: Sequence[psutil.Process]) -> None:
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(processes, 10)

    def logs(self) -> str:
        """The last lines of what the daemons wrote."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {each.name}\n{each.read_text(errors='replace')[-2000:]}" for each in files)

    # --- jobs -------------------------------------------------------------------------------------

    def run(self, *words: str, check: bool = True, cwd: Path | None = None, **variables: str) -> str:
        """Run a command with this Slurm; return what it prints."""
        done = subprocess.run(
            words, env={**self.variables, **variables}, cwd=cwd, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or not check, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def queue(self) -> str:
        return self.run("squeue", "--format=%.10i %.9P %.20j %.10T %.8M %N %r")

    def facts(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job or of an element of an array."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()[0]
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def state(self, job: str) -> str:
        """The state of a job: PENDING, RUNNING, COMPLETED, CANCELLED, FAILED …"""
        return self.facts(job)["JobState"]

    def wait_for_state(self, job: str, *states: str) -> str:
        """Wait until a job has one of the states; return it."""
        wait_until(
            lambda: self.state(job) in states,
            lambda: (
                f"{job} is not {' or '.join(states)} but {self.state(job)}\n{self.queue()}\n{self.logs()}"
            ),
        )
        return self.state(job)

    def wait_for_end(self, job: str) -> str:
        """Wait until a job has left the queue; return its last state."""
        going = ("PENDING", "RUNNING", "COMPLETING")
        wait_until(
            lambda: self.state(job) not in going, lambda: f"{job} does not end\n{self.queue()}\n{self.logs()}"
        )
        return self.state(job)

    def hurry(self, job: str) -> None:
        """Wait until a job was started again, after a shorter pause than the one that Slurm makes."""
        is_hurried = False

        def has_started() -> bool:
            nonlocal is_hurried
            facts = self.facts(job)
            if not is_hurried and facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime":
                # Not at once: a host refuses credentials of a job that are as old as its end, by the second.
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds")
                is_hurried = True
            return facts["JobState"] == "RUNNING" and facts["Restarts"] != "0"

        wait_until(has_started, lambda: f"{self.facts(job)}\n{self.queue()}\n{self.logs()}")

    @contextmanager
    def preempting(self, job: str) -> Iterator[None]:
        """Take the host of a job for a more urgent one, for as long as the block lasts."""
        host = self.facts(job)["NodeList"]
        where = ["--partition=urgent", f"--nodelist={host}", f"--cpus-per-task={CPUS}", "--output=/dev/null"]
        urgent = self.run("sbatch", "--parsable", *where, "--wrap=sleep 600").strip()
        try:
            yield
            self.wait_for_state(urgent, "RUNNING")
        finally:
            self.run("scancel", urgent)

    def wait_for_no_process(self) -> None:
        """Wait until nothing of any job runs."""
        wait_until(
            lambda: not self.processes(), lambda: f"left: {[each.cmdline() for each in self.processes()]}"
        )


def _variable(process: psutil.Process, name: str) -> str | None:
    """A variable of a process's environment, as it was started; None if we may not see it."""
    try:
        found: str | None = process.environ().get(name)
    except psutil.Error:
        return None
    return found


def _open_files(process: psutil.Process) -> set[str]:
    with suppress(psutil.Error):
        return {each.path for each in process.open_files()}
    return set()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@contextmanager
def running_slurm() -> Iterator[Slurm]:
    """Run a Slurm of our own; nothing of it is left afterwards."""
    # A short path: it holds a Unix socket. Readable by all: munged refuses a socket that others cannot reach.
    folder = Path(tempfile.mkdtemp(prefix="w5slurm-"))
    folder.chmod(0o755)
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.close()
        shutil.rmtree(folder)
