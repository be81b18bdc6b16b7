"""Codes 3xx, 4xx and 7xx: computing, the run folder, and bugs in w5xde."""

from __future__ import annotations

from w5xde.explanations.explanation import Explanation

RUNNING = [
    Explanation(
        "W5-301",
        "the device that was asked for is not here",
        "torch was built without it, its driver does not work, or its name is misspelt.",
        "--devices auto takes the best there is, --devices cpu always works; or install the build of torch"
        " for it.",
        "w5xde doctor\nw5xde join @ticket --devices cpu",
    ),
    Explanation(
        "W5-302",
        "this node cannot go on",
        "something failed here that no batch is responsible for: the device was lost, memory ran out, or"
        " there is a bug in w5xde. The pool goes on without this node.",
        "join again; if it happens again, look at the device and the memory, and at what --log verbose adds.",
        "w5xde doctor\nw5xde join @ticket --log verbose",
    ),
    Explanation(
        "W5-303",
        "this system cannot fork or freeze processes",
        "local nodes and benchmarks are forked, and chaos freezes processes; Windows can do neither.",
        "start nodes by hand in other terminals, or use Linux or macOS.",
        "w5xde serve train.py --ticket-file ticket\nw5xde join @ticket",
    ),
    Explanation(
        "W5-304",
        "this machine has too little memory for so many local nodes",
        "every local node is a process: even with the smallest model it needs 10 MiB that it shares with no"
        " other.",
        "start fewer nodes here, and let other machines join.",
        "w5xde train train.py --nodes 4",
    ),
    Explanation(
        "W5-311",
        "training cannot go on",
        "a step makes the weights infinite, batches fail on every node, or no node is left. The message"
        " has the reason; earlier checkpoints are kept.",
        "lower the learning rate or clip the gradient; correct the data or the loss and resume; or leave"
        " bad batches out. The message has the advice that fits.",
        "w5xde train --resume latest --skip-bad-batches",
    ),
    Explanation(
        "W5-312",
        "the pool's weights differ from those of one process",
        "the demo trains twice and compares; a difference is a bug in w5xde or in the machine (memory"
        " that flips bits, another kind of CPU for some nodes).",
        "run it again; if it happens again, report it with the run's folder.",
        "w5xde demo --json",
    ),
    Explanation(
        "W5-313",
        "the chaos test found a violation, or one of its processes ended by itself",
        "the audit of the run counted a batch that was applied twice or not at all, or a process ended"
        " that the test had not killed.",
        "look at the logs it names; report an audit that is not clean with the run's folder.",
        "w5xde audit latest",
    ),
    Explanation(
        "W5-320",
        "a process of a benchmark failed, stopped answering or ended",
        "it raised an error (the message has it and its place), ran out of memory, or took longer than"
        " its time.",
        "measure less at once: fewer nodes, a smaller model, more seconds.",
        "w5xde bench exchange --help",
    ),
    Explanation(
        "W5-321",
        "some light nodes of a benchmark could not join",
        "connections were refused or broke while many came at once; the message has the first reason.",
        "measure fewer nodes, and look at the limit of open files.",
        "ulimit -n\nw5xde bench scale --nodes 100",
    ),
    Explanation(
        "W5-401",
        "there is no such run, or its manifest cannot be read",
        "w5xde looks for runs in the folder runs/ of the current folder; a run has a manifest.json.",
        "go to the folder where the run was started, or name the folder of runs.",
        "w5xde audit latest --runs /data/runs",
    ),
    Explanation(
        "W5-402",
        "the trained model cannot be written",
        "the disk is full, or the folder is not writable. The checkpoints are still there.",
        "make room, then export the weights from the newest checkpoint, or resume.",
        "w5xde export latest --out /elsewhere/model.safetensors",
    ),
    Explanation(
        "W5-403",
        "there is a run of that name already",
        "a run never overwrites another.",
        "go on with it, or choose another name.",
        "w5xde train --resume tuesday\nw5xde train train.py --name wednesday",
    ),
    Explanation(
        "W5-404",
        "the run folder cannot be made or used",
        "it is not writable, the disk is full, or a file is in its place.",
        "make room there, or choose another folder.",
        "w5xde train train.py --runs ~/runs\nw5xde doctor --runs ~/runs",
    ),
    Explanation(
        "W5-405",
        "the job does not fit the run that is resumed",
        "model, optimizer, scheduler, sampler or the number of samples are not those that the run began with,"
        " so its state cannot be loaded, or samples would count twice.",
        "resume with the job file the run was started with, or start a new run.",
        "w5xde train --resume latest",
    ),
    Explanation(
        "W5-406",
        "the run is in use",
        "another coordinator is running in its folder; two would overwrite each other's files.",
        "stop the other one; the message names its process and machine.",
        "kill -INT 4121\nw5xde train --resume tuesday",
    ),
    Explanation(
        "W5-407",
        "no checkpoint of the run can be used",
        "they are damaged, missing, written for another job, or none was written yet. w5xde never starts"
        " a run from the beginning without being told to.",
        "restore checkpoints/ from a copy, use the job file the run was started with, or start a new run.",
        "w5xde audit tuesday",
    ),
    Explanation(
        "W5-415",
        "the folder of a run has no manifest, and is not empty",
        "with --resume auto a run begins in such a folder only if it holds nothing but what a start leaves"
        " behind that was killed before it began.",
        "restore manifest.json from a copy, remove the folder, or choose another name.",
        "w5xde train train.py --name wednesday --resume auto",
    ),
    Explanation(
        "W5-416",
        "the run is in use, and stayed so for 30 s",
        "with --resume auto a coordinator waits for an earlier one of the same run, which may be ending, also"
        " on another host. This one did not end. The exit code is 75: try again.",
        "start the same command again later, or stop the other one; the message names its process and"
        " machine.",
        "w5xde serve train.py --name tuesday --resume auto",
    ),
    Explanation(
        "W5-700",
        "internal error",
        "something happened that w5xde did not expect: a bug in w5xde, or in a library.",
        "please report it, with the versions and what --log verbose adds.",
        "w5xde doctor --json\nw5xde train train.py --log verbose",
    ),
]
