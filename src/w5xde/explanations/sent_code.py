"""Codes 285 to 289: code that a coordinator sends to nodes."""

from __future__ import annotations

from w5xde.explanations.explanation import Explanation

_SHA256 = "9b1c5d0c1f5b1f2d7a3e6c8f0a4b2d6e8c0f1a3b5d7e9f0a2c4e6b8d0f1a3c5e"

SENT_CODE = [
    Explanation(
        "W5-285",
        "nobody here agreed to run the code that the coordinator sent",
        "without a JOB, join gets the coordinator's job file, and code can do all that its user can do. So it"
        " runs only if you say y in a terminal, if --accept-code names its whole sha256, or if you agreed to"
        " the same code of the same coordinator before. Code that came in clear text from another machine"
        " needs --accept-code. Nothing of it ran.",
        "join in a terminal, read it with show, and say y; in a script name the sha256 that the coordinator"
        " prints; or name a copy of the job that you trust.",
        f"w5xde join @ticket\nw5xde join @ticket --accept-code {_SHA256}\nw5xde join @ticket train.py",
    ),
    Explanation(
        "W5-286",
        "the coordinator sends no code",
        "it is a pool: pools never send code. Or its run was started with --ship off; or its job is no"
        " file that could be sent: a Job object of a program or notebook, a module (package.module:job),"
        " or a file with a name or encoding that does not travel. Or it is sending its code to very"
        " many nodes at this moment.",
        "copy the job to this machine and name it.",
        "scp coordinator:train.py .\nw5xde join @ticket train.py",
    ),
    Explanation(
        "W5-287",
        "what --ship names cannot be sent to nodes",
        "only Python files beside the job file, or in folders there, are sent: at most 256 files and 4 MiB,"
        " UTF-8, no links, names of ASCII letters, digits, _ and -, none that takes the place of a module of"
        " Python, torch, numpy or w5xde. Data and installed packages are not sent.",
        "name files or folders as seen from the job file, and fewer of them; or send nothing and copy the"
        " files yourself.",
        "w5xde serve train.py --ship helper.py,layers\nw5xde serve train.py --ship off",
    ),
    Explanation(
        "W5-288",
        "the coordinator's code imports something that this machine does not have",
        "w5xde never installs packages. Modules beside the job file are sent only if --ship names them. A"
        " file whose name is that of a module in use here cannot be imported either.",
        "install the package that the message names, in the coordinator's version; or start the coordinator"
        " with --ship and the file.",
        "pip install transformers\nw5xde serve train.py --ship helper.py",
    ),
    Explanation(
        "W5-289",
        "the job of the run is not the code that this node runs",
        "the coordinator was started again with a job file that has changed. A node that runs code which the"
        " coordinator sent goes on only with exactly that code.",
        "join again: the new code is shown, and you are asked.",
        "w5xde join @ticket",
    ),
]
