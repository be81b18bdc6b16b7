"""Codes 600 to 619: runs on an engine, such as a Ray cluster."""

from __future__ import annotations

from w5xde.explanations.explanation import Explanation

ENGINES = [
    Explanation(
        "W5-600",
        "Ray cannot be imported",
        "--engine ray needs the package ray, an extra of w5xde, here and on every host of the cluster.",
        "install it into the environment in which w5xde is installed.",
        "pip install 'w5xde[ray]'",
    ),
    Explanation(
        "W5-601",
        "no Ray cluster can be reached",
        "w5xde asks the cluster that RAY_ADDRESS names, else the one that this machine belongs to. Nothing"
        " answers there, this machine is no host of it, or the address is one of Ray Client, which cannot"
        " mind a run.",
        "start a cluster, name its head on a host that belongs to it, or submit the command as a job.",
        "ray start --head\nRAY_ADDRESS=10.0.0.4:6379 w5xde train train.py --engine ray\n"
        "ray job submit --address http://10.0.0.4:8265 --working-dir . -- w5xde train train.py --engine ray"
        " --runs /shared/runs",
    ),
    Explanation(
        "W5-602",
        "a host of the cluster does not see the folder of runs",
        "a coordinator whose host dies is started again on another one, and goes on with what is in that"
        " folder. So all hosts must see the same folder; w5xde wrote a file there and asked every host.",
        "name a folder on storage that all hosts share, such as NFS.",
        "w5xde train train.py --engine ray --runs /shared/runs",
    ),
    Explanation(
        "W5-603",
        "a host of the cluster does not have the job's file",
        "the commands of a run are started with the words that were typed, in the folder in which they were"
        " typed, on any host.",
        "keep the job on storage that all hosts share, or let Ray copy the folder to them.",
        "ray job submit --working-dir . -- w5xde train train.py --engine ray --runs /shared/runs",
    ),
    Explanation(
        "W5-604",
        "a host of the cluster has no w5xde",
        "its Python, or the image of its container, cannot import w5xde, or has one without engines.",
        "install the same version on every host, or name an image that has it.",
        "pip install 'w5xde[ray]'",
    ),
    Explanation(
        "W5-605",
        "no host of the cluster has what a node needs",
        "nodes would wait for ever: each asks for the cores, GPUs and labels that were given, and no host has"
        " them.",
        "ask for less. If an autoscaler brings such hosts, say so with a range from 0.",
        "w5xde train train.py --engine ray --nodes 8 --cpus-per-node 2\n"
        "w5xde train train.py --engine ray --nodes 0..8 --gpus-per-node 1",
    ),
    Explanation(
        "W5-606",
        "the cluster no longer minds this run",
        "its head does not answer, or was restarted without storage and has forgotten all actors. The"
        " coordinator has ended in order, where it noticed in time; what was saved is in the run's folder.",
        "start the cluster again and give the same command: with --name and --resume auto the run goes on.",
        "w5xde train train.py --engine ray --runs /shared/runs --name tuesday --resume auto",
    ),
    Explanation(
        "W5-607",
        "the run has ended, and its folder has no result",
        "its coordinator was stopped before it could write one, or this machine sees an older state of the"
        " shared folder.",
        "give the same command again, with --name and --resume auto: the run goes on.",
        "w5xde train train.py --engine ray --runs /shared/runs --name tuesday --resume auto",
    ),
    Explanation(
        "W5-608",
        "a command on the cluster ended without saying why",
        "a process of the run was killed again and again: its host ran out of memory, for example. The"
        " message has what it printed last.",
        "look at the logs of its actor, and give its host more memory or the run fewer nodes.",
        "ray logs actor --id ID\nw5xde train train.py --engine ray --nodes 2",
    ),
    Explanation(
        "W5-609",
        "the job is in no file that an engine could load",
        "an engine starts commands on other hosts, which load the job by its file. A Job that a function or"
        " a notebook made has none.",
        "write the job at the top level of a file, and train it there under  if __name__ == '__main__': .",
        "w5xde train train.py --engine ray",
    ),
    Explanation(
        "W5-610",
        "callbacks cannot be given to a run on an engine",
        "they would have to run in the coordinator's process, on another host.",
        "let the job bring them along: it is loaded there.",
        "job = w5xde.Job(…, callbacks=lambda: [w5xde.SaveBest('loss')])",
    ),
]
