"""Codes 620 to 649: `w5xde deploy`, files for Slurm, Kubernetes and systemd."""

from __future__ import annotations

from w5xde.explanations.explanation import Explanation

DEPLOYING = [
    Explanation(
        "W5-620",
        "the time limit leaves no time to train",
        "Slurm tells a job some time before its limit (--warning), so that it ends in order and is queued"
        " again. With a limit as short as that it would be told as soon as it starts.",
        "give a longer time limit, or a shorter warning. Limits are written as minutes, hours:minutes:seconds"
        " or days-hours.",
        "w5xde deploy slurm train.py --time 12:00:00\nw5xde deploy slurm train.py --time 5 --warning 60",
    ),
    Explanation(
        "W5-621",
        "the hosts do not share a folder",
        "coordinator and nodes run on several hosts, and meet in the folder of runs, where the ticket file"
        " says where the coordinator is. Every host has /tmp for itself, for example. A job that does not"
        " find the file that submit.sh wrote ends with this error too.",
        "name a folder on storage that all hosts share; or say that there is only one host.",
        "w5xde deploy slurm train.py --runs /shared/runs\nw5xde deploy slurm train.py --one-host",
    ),
    Explanation(
        "W5-622",
        "there is no command w5xde on the host",
        "Slurm gives jobs the environment in which they were submitted, and w5xde is not in its PATH, or lies"
        " where only the submitting host sees it.",
        "activate the environment before submit.sh, or have the jobs do it; it must be on storage that all"
        " hosts share.",
        "w5xde deploy slurm train.py --setup 'source /shared/venv/bin/activate'",
    ),
    Explanation(
        "W5-630",
        "the job to deploy cannot be read",
        "the files name the job, and some hold it, so it must exist and be a Python program; it is not run.",
        "give the path of a file that has a w5xde.Job, or of a module that is installed where it runs.",
        "w5xde deploy systemd train.py --advertise pool.lan\n"
        "w5xde deploy systemd package.module:job --advertise pool.lan",
    ),
    Explanation(
        "W5-631",
        "the name of the run cannot be used there",
        "the name becomes that of a folder, and of the engine's own objects; engines allow fewer characters"
        " than folders do.",
        "give another name.",
        "w5xde deploy systemd train.py --advertise pool.lan --name tuesday",
    ),
    Explanation(
        "W5-632",
        "a flag contradicts the files",
        "how a run is named, resumed and reached is what the files say; a flag after the -- would say it"
        " a second time.",
        "leave the flag out, or give the one of  w5xde deploy  that the error names.",
        "w5xde deploy systemd train.py --advertise pool.lan --name tuesday -- --epochs 5",
    ),
    Explanation(
        "W5-634",
        "the job is too large for a ConfigMap",
        "Kubernetes keeps the job and the modules that it ships in a ConfigMap, which holds one MiB.",
        "copy the files into the image, and name the job as it lies there.",
        "w5xde deploy k8s /app/train.py --job-in-image --image registry.example/mine:1",
    ),
    Explanation(
        "W5-635",
        "the files cannot be written",
        "the folder cannot be written, or holds a file of that name with other contents.",
        "remove the file, or write into another folder.",
        "w5xde deploy systemd train.py --advertise pool.lan --out units",
    ),
    Explanation(
        "W5-637",
        "the job imports a module that would be left behind",
        "the job file travels to where it runs, and only those modules beside it that --ship names.",
        "name them, or install them as a package there.",
        "w5xde deploy k8s train.py --image registry.example/w5xde:1 -- --ship helper.py,layers",
    ),
    Explanation(
        "W5-638",
        "a path cannot be named in a unit",
        "systemd splits lists of paths at blanks and colons, and reads quotes, backslashes, semicolons and"
        " dollars itself.",
        "give the whole path, or move the files to a place without such characters.",
        "w5xde deploy systemd /srv/train.py --advertise pool.lan --w5xde /opt/w5xde/bin/w5xde",
    ),
    Explanation(
        "W5-639",
        "the unit's user cannot read the job",
        "the unit runs as a user that systemd makes for it (DynamicUser), and the job file or its folder is"
        " closed to other users.",
        "let others read the file, and enter its folder; or copy it to a place like /srv.",
        "chmod o+r train.py && chmod o+x .",
    ),
]
