"""The texts of the files for Slurm. Knows no flags, and refuses nothing."""

from __future__ import annotations

import shlex
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from w5xde.deploy.request import DeployRequest

# The environment of a job that crashes again and again is at fault, not chance.
CRASHES_MAX = 5
# What a job says if its host cannot run it.
NOT_SHARED, NO_COMMAND = "W5-621", "W5-622"
# How long nodes have to hear of the end of the run: they dial at least every 4 s.
PARTING_SECONDS = 5


@dataclass(frozen=True, slots=True)
class SlurmResources:
    """What one job asks Slurm for; every word is fit for an #SBATCH line."""

    cpus: int
    gpus: int = 0
    partition: str | None = None
    more: tuple[str, ...] = ()

    def words(self) -> Iterable[str]:
        """The options of sbatch, without those that every job here has."""
        yield f"--cpus-per-task={self.cpus}"
        if self.gpus:
            yield f"--gres=gpu:{self.gpus}"
        if self.partition is not None:
            yield f"--partition={self.partition}"
        yield from self.more


@dataclass(frozen=True, slots=True)
class SlurmRun:
    """A run as its files describe it."""

    request: DeployRequest
    # Where the run is kept, and where its commands are started: folders that all hosts see.
    runs: str
    folder: str
    pool: SlurmResources
    node: SlurmResources
    # The range of the array, like 1-64%32.
    array: str
    # Processes of each array element that compute, one for each GPU or for so many torch threads.
    nodes_of_element: int
    wait: str
    port: int
    # Seconds before the time limit at which Slurm tells w5xde to end.
    warning_seconds: int
    time: str | None = None
    account: str | None = None
    setup: tuple[str, ...] = ()


class _Text(string.Template):
    """A text whose places are written @{so}, because shell scripts are full of dollars."""

    delimiter = "@"


_POOL = """\
#!/bin/bash
# The coordinator of the run @{run}: it owns the model and the data, and keeps the run in its folder.
# Printed by  w5xde deploy slurm;  submit.sh submits it, now and whenever the run should go on.

# One process. Nodes are jobs of their own: this one waits for no host but its own.
@{options}
# Never two at once: a second one waits until the first has ended.
#SBATCH --dependency=singleton
@{common}#SBATCH --output=pool-%j.log

me=$SLURM_JOB_ID
@{start}
rm -f "$place/over"
# It may start again on another host, and with another port: the ticket file tells nodes where it is now, and
# they know it again by its key. If what started it is killed, it ends too (--with-parent).
srun --ntasks=1 --cpus-per-task=@{cpus} @{serve}
code=$?
@{end}    say "the run is over"
    # Nodes that hear of it leave by themselves. Those that wait for a coordinator are told to end, and those
    # in the queue are taken out of it.
    touch "$place/over"
    sleep @{parting}
    for array in "$place"/arrays/*; do
        [ -e "$array" ] || continue
        scancel --quiet --state=PENDING "${array##*/}"
        scancel --quiet --signal=TERM "${array##*/}"
        rm -f "$array"
    done
fi
exit $code
"""

_NODES = """\
#!/bin/bash
# The nodes of the run @{run}: they compute what its coordinator lends them, come and go at any time.
# Printed by  w5xde deploy slurm;  submit.sh submits it, and  sbatch nodes.sbatch  adds as many nodes again.

# An array: each element starts as soon as there is room for it alone.
#SBATCH --array=@{array}
@{options}
@{common}#SBATCH --output=node-%A_%a.log

# Not $SLURM_JOB_ID: for one of the elements that is the number of the whole array.
me=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
@{start}
if [ -e "$place/over" ]; then
    say "the run is over"
    exit 0
fi
touch "$place/arrays/$SLURM_ARRAY_JOB_ID"
# A folder of its own for its credential, with which it comes back as the same node.
export W5XDE_STATE=$place/nodes/$me
# Waits for the ticket file, and reads it again whenever the coordinator does not answer.
srun --ntasks=1 --cpus-per-task=@{cpus} @{join} --node-name "slurm-$me"
code=$?
# The coordinator ended while this node was looking for it.
[ $code -eq 75 ] && [ -e "$place/over" ] && code=0
@{end}    say "the run is over"
fi
exit $code
"""

_COMMON = """\
# Slurm itself starts the job again if its host dies, or is taken from it without a grace time.
#SBATCH --requeue
# SIGTERM @{seconds} s before the time limit, or up to a minute earlier: w5xde ends in order within 20 s.
#SBATCH --signal=TERM@@@{seconds}
# One log for all starts.
#SBATCH --open-mode=append
"""

_START = """\
# The ticket file, the coordinator's key and the nodes' credentials; submit.sh makes this folder, and only its
# owner can read it.
place=@{place}
say() { echo "$(date '+%F %T') $me on $(hostname): $*" >&2; }

if [ ! -e "$place/submitted" ]; then
    say "error[@{not_shared}]: there is no $place/submitted, which submit.sh writes. Submit with it;" \\
        "if you did, this host does not share that folder: deploy with  --runs DIR  that all hosts share"
    exit 2
fi
cd @{folder} || exit 2
@{setup}if ! command -v w5xde >/dev/null; then
    say "error[@{no_command}]: there is no command w5xde here: activate its environment before submit.sh," \\
        "or deploy with  --setup 'source DIR/bin/activate',  on storage that all hosts share"
    exit 2
fi
# A preemption with a grace time, and the time limit, tell only w5xde, which runs under srun. scancel tells
# this shell too: a job that was cancelled is not queued again.
told=
trap 'told=1' TERM
say "starting, after ${SLURM_RESTART_COUNT:-0} restarts"\
"""

_END = """\
again() {
    if [ -n "$told" ]; then
        say "$1; Slurm ended this job"
    elif scontrol requeue "$me"; then
        say "$1; queued again"
    else
        say "$1; scontrol requeue failed: submit again with submit.sh"
    fi
}

# Slurm does not queue a job again that ends by itself, whatever its exit code: we do.
if [ $code -eq 75 ]; then
    again "stopped before the run was over"
elif [ $code -gt 128 ]; then
    # Killed, for example because it used more memory than it has: a few times that may be chance.
    echo "$(date '+%F %T') $(hostname) exit code $code" >>"$place/crashes-$me"
    if [ "$(wc -l <"$place/crashes-$me")" -le @{crashes} ]; then
        again "killed by signal $((code - 128))"
    else
        say "killed by signal $((code - 128)), more than @{crashes} times: given up"
    fi
elif [ $code -ne 0 ]; then
    say "exit code $code: trying again would not help, the lines above say why"
else
"""

_SUBMIT = """\
#!/bin/bash
# Submit the coordinator and the nodes of the run @{run}. Later, after scancel or an error, the same command
# goes on with the run where it stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Jobs look for this file: a host that does not find it does not share the folder.
place=@{place}
mkdir -p "$place/arrays"
chmod 700 "$place"
echo "submitted on $(hostname)" >"$place/submitted"
rm -f "$place/over"

pool=$(sbatch --parsable pool.sbatch)
pool=${pool%%;*}
# Nodes start when the coordinator has started once: before that they would only wait.
if ! nodes=$(sbatch --parsable --dependency="after:$pool" nodes.sbatch); then
    scancel "$pool"
    exit 1
fi
echo "coordinator: job $pool, pool-$pool.log; nodes: array ${nodes%%;*}, node-${nodes%%;*}_*.log"
echo "to stop, to go on later:  scancel $pool ${nodes%%;*}  ./submit.sh"
"""


def place_of(run: SlurmRun) -> str:
    """The folder with the ticket file and the keys, beside that of the run."""
    return f"{run.runs}/{run.request.run}.slurm"


def pool_script(run: SlurmRun) -> str:
    """The job of the coordinator."""
    place = place_of(run)
    entrance = ["--host", "0.0.0.0", "--port", str(run.port)]
    known = ["--identity", f"{place}/identity", "--ticket-file", f"{place}/ticket"]
    # As long as this start lasts; the next one writes another.
    limits = ["--ticket-lifetime", "never", "--ticket-uses", "any"]
    serve = run.request.serve_words(
        run.request.job.place, run.runs, *entrance, *known, *limits, "--with-parent"
    )
    return _Text(_POOL).substitute(
        run=run.request.run,
        options=_options(run, "pool", run.pool),
        common=_common(run),
        start=_start(run),
        cpus=run.pool.cpus,
        serve=shlex.join(serve),
        end=_Text(_END).substitute(crashes=CRASHES_MAX),
        parting=PARTING_SECONDS,
    )


def nodes_script(run: SlurmRun) -> str:
    """The jobs of the nodes, as an array."""
    join = ["w5xde", "join", f"@{place_of(run)}/ticket", run.request.job.place]
    how = ["--nodes", str(run.nodes_of_element), "--wait", run.wait, "--with-parent"]
    return _Text(_NODES).substitute(
        run=run.request.run,
        array=run.array,
        options=_options(run, "nodes", run.node),
        common=_common(run),
        start=_start(run),
        cpus=run.node.cpus,
        join=shlex.join([*join, *how]),
        end=_Text(_END).substitute(crashes=CRASHES_MAX),
    )


def submit_script(run: SlurmRun) -> str:
    """The script that submits both."""
    return _Text(_SUBMIT).substitute(run=run.request.run, place=shlex.quote(place_of(run)))


def _options(run: SlurmRun, what: str, resources: SlurmResources) -> str:
    words = [f"--job-name=w5-{run.request.run}-{what}", "--nodes=1", "--ntasks=1", *resources.words()]
    if run.account is not None:
        words.append(f"--account={run.account}")
    if run.time is not None:
        words.append(f"--time={run.time}")
    return _directives(words)


def _directives(words: Sequence[str]) -> str:
    return "\n".join(f"#SBATCH {word}" for word in words)


def _common(run: SlurmRun) -> str:
    return _Text(_COMMON).substitute(seconds=run.warning_seconds)


def _start(run: SlurmRun) -> str:
    setup = "".join(f"{line}\n" for line in run.setup)
    return _Text(_START).substitute(
        place=shlex.quote(place_of(run)),
        folder=shlex.quote(run.folder),
        setup=setup,
        not_shared=NOT_SHARED,
        no_command=NO_COMMAND,
    )
