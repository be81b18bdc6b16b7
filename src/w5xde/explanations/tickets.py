"""Codes of tickets, private files and encryption: 101, 105, 113 to 119, 123 to 128, 410 to 414, and 5xx."""

from __future__ import annotations

from w5xde.explanations.explanation import Explanation

TICKETS = [
    Explanation(
        "W5-101",
        "the ticket is damaged, or the text is not a ticket",
        "a ticket is one long word that begins with w5; its length and checksum show that characters are"
        " missing, were added, or were changed.",
        "copy the whole line again, use a file, or make a new ticket where the coordinator runs.",
        "w5xde ticket new latest\nw5xde join @ticket",
    ),
    Explanation(
        "W5-105",
        "the coordinator no longer accepts this ticket",
        "it has expired, was revoked, or was used by as many nodes as it was made for. Nodes that joined"
        " with it before stay, and can come back.",
        "make a new one where the coordinator runs.",
        "w5xde ticket new latest --lifetime 7d --uses any",
    ),
    Explanation(
        "W5-113",
        "the coordinator does not know this ticket, or this node",
        "the ticket belongs to another run, the run was started anew or with --new-identity, or its"
        " register was restored from a copy that is older than the ticket. A wrong secret gets the same"
        " answer.",
        "get a new ticket from the user of the coordinator.",
        "w5xde ticket list latest\nw5xde ticket new latest",
    ),
    Explanation(
        "W5-114",
        "this node is banned from the run",
        "the user of the coordinator banned it with w5xde ticket ban, or the coordinator banned it"
        " because its updates were wrong. Then no new node can join from its address with the same ticket"
        " either.",
        "ask the user of the coordinator. A ban lasts as long as the run, unless the user lifts it;"
        " another node at that address needs another ticket.",
        "w5xde ticket list latest\nw5xde ticket unban latest lab-3",
    ),
    Explanation(
        "W5-115",
        "a ticket cannot be made like this",
        "it has room for four addresses or names with one port, and for a lifetime until the year 2106.",
        "name fewer or shorter hosts, or a shorter lifetime.",
        "w5xde serve train.py --host 0.0.0.0 --advertise trainer.example.org",
    ),
    Explanation(
        "W5-116",
        "no ticket was given, or it cannot be read",
        "w5xde looks for it on the command line, in the file after an @, on standard input for -, and"
        " otherwise in W5XDE_TICKET.",
        "give it in one of these ways; a file is best on a machine with other users.",
        "w5xde join @ticket",
    ),
    Explanation(
        "W5-117",
        "a lifetime or a number of uses is not valid",
        "a lifetime is a number with s, m, h or d, or never; the number of uses is 1 or more, or any.",
        "write it like this.",
        "w5xde ticket new latest --lifetime 24h --uses 100",
    ),
    Explanation(
        "W5-118",
        "the run has no such ticket or node, or several",
        "a ticket is named by its id or the beginning of it, a node by its id or the name that it has in"
        " the run. Local nodes have no ticket: they are not in the list, and cannot be banned by hand. In"
        " a run that an earlier version began, several nodes may have one name.",
        "look it up in the list, and use the id.",
        "w5xde ticket list latest\nw5xde ticket ban latest lab-3",
    ),
    Explanation(
        "W5-119",
        "the ticket's file, or locate(), now names another coordinator",
        "this node has worked for one coordinator, lost it, and found the ticket of another one where its own"
        " was: a new run was started with the same --ticket-file. A node follows its coordinator to another"
        " address, but not to a run that its user did not choose. A node that was never let in takes any"
        " ticket that it finds.",
        "join again if you mean the new run. To go on with the old one, resume it; with --identity it is the"
        " same coordinator on any machine.",
        "w5xde join @ticket\nw5xde serve --resume tuesday --identity keys --ticket-file ticket",
    ),
    Explanation(
        "W5-123",
        "there is no identity in the folder, and none can be made there",
        "--identity names a folder with identity.pem, the key by which nodes know the coordinator. The folder"
        " has none, and is read-only or another user's: a mounted secret lacks its file, for example.",
        "make the identity before, and put identity.pem (and offline-tickets.json, if it is there) into the"
        " folder or the secret.",
        "w5xde ticket new --offline --identity keys --advertise trainer.example.org --out ticket\n"
        "kubectl create secret generic w5xde --from-file=keys --from-file=ticket",
    ),
    Explanation(
        "W5-124",
        "the ticket was not made for this identity",
        "a ticket pins one certificate. The coordinator has another one, so that nodes would refuse it; or"
        " the ticket has not the secret with which it was made.",
        "give the folder and the file that were made together, or make a new ticket for that folder.",
        "w5xde ticket new --offline --identity keys --advertise trainer.example.org --out ticket\n"
        "w5xde serve train.py --host 0.0.0.0 --identity keys --ticket @ticket",
    ),
    Explanation(
        "W5-125",
        "the ticket that the coordinator was given admits nobody any more",
        "it has expired, or was revoked. A new run would wait for nodes that cannot join. A run that is"
        " resumed goes on, because nodes that joined before come back by their credentials.",
        "make a new one, with a longer lifetime; or one of the run, once it is served.",
        "w5xde ticket new --offline --identity keys --advertise trainer.example.org --lifetime 30d",
    ),
    Explanation(
        "W5-126",
        "the addresses in the ticket do not fit what is served",
        "the ticket names another machine, and the coordinator listens for its own machine alone; or it names"
        " another port. The latter is only a warning: a proxy or a Kubernetes Service may translate ports.",
        "listen where the ticket leads, or make a ticket that leads there.",
        "w5xde serve train.py --host 0.0.0.0 --port 5555 --identity keys --ticket @ticket",
    ),
    Explanation(
        "W5-127",
        "a run that is resumed has another identity than before",
        "its key is in the state folder of another machine or user (W5XDE_STATE), or another --identity was"
        " given, so a new certificate is used. Nodes and tickets of before pin the old one, and cannot come.",
        "resume it with the folder that has its key. To be able to resume on any machine, start a run with"
        " --identity on storage that all of them see.",
        "w5xde serve --resume tuesday --identity /shared/keys",
    ),
    Explanation(
        "W5-128",
        "locate() found no ticket",
        "the function that was given to w5xde.join as locate= raised an exception (its file and line are in"
        " the message), returned None until the wait was over, or returned something that is no ticket.",
        'return the text of a ticket, or None while there is none; wait="1h" or wait="forever" waits longer.',
        'w5xde.join(locate=lambda: registry.get("ticket"), wait="forever")',
    ),
    Explanation(
        "W5-410",
        "other users can read a file with secrets, or own it",
        "only their owner may read keys, credentials and the register: anybody else who reads them can"
        " act as this run or this node.",
        "correct the permissions; if others may have read the file, remove it and start or join anew.",
        "chmod 700 ~/.local/state/w5xde\nchmod 600 ~/.local/state/w5xde/runs/*.pem",
    ),
    Explanation(
        "W5-411",
        "a file with secrets cannot be read or written",
        "the disk is full, or the folder is not writable; keys and credentials are kept in"
        " ~/.local/state/w5xde.",
        "make room, or name another folder with W5XDE_STATE.",
        "export W5XDE_STATE=/data/w5xde-state\nw5xde join @ticket",
    ),
    Explanation(
        "W5-412",
        "another process holds a lock",
        "a w5xde command was stopped halfway and keeps its lock, or 256 nodes of this machine are in the"
        " run.",
        "end that process, and try again.",
        "ps aux | grep w5xde",
    ),
    Explanation(
        "W5-413",
        "a key or a credential is damaged",
        "the file does not hold what was written into it, or belongs to another run.",
        "restore it from a copy; or let the coordinator make a new key and issue new tickets. A node's"
        " credential can be removed: the node then joins with a ticket.",
        "w5xde serve train.py --resume tuesday --new-identity",
    ),
    Explanation(
        "W5-414",
        "the run's register of tickets cannot be used",
        "tickets.json in the run folder is missing, damaged or full. w5xde does not begin a new one by"
        " itself, because this one holds the admitted nodes and the bans.",
        "restore it from a copy, or let all nodes join anew with --new-identity; a run that was never"
        " served has no register yet.",
        "w5xde serve train.py --resume tuesday --new-identity",
    ),
    Explanation(
        "W5-501",
        "the machine that answers did not make this ticket",
        "its certificate is not the one that the ticket names. The run was started anew (or with"
        " --new-identity), moved to another machine, or somebody intercepts the connection. The node sent"
        " nothing to it.",
        "compare the fingerprint where the coordinator runs, and use a new ticket of that run.",
        "w5xde ticket list latest\nw5xde ticket new latest",
    ),
    Explanation(
        "W5-503",
        "no TLS 1.3 connection could be made",
        "another program listens there, a proxy intercepts connections, the coordinator refuses new"
        " connections for now, or its own certificate has expired or is for another name.",
        "look at the coordinator's terminal; with certificates of your own check --tls-ca, name and dates.",
        "w5xde doctor @ticket\nopenssl x509 -in cert.pem -noout -subject -dates",
    ),
    Explanation(
        "W5-504",
        "the TLS of this Python is not safe",
        "before 3.11.5, bytes that were sent before the handshake could be read as if they had come after"
        " it (CVE-2023-40217).",
        "install a newer Python.",
        "python3 --version",
    ),
    Explanation(
        "W5-505",
        "a certificate, its key or an authority cannot be used",
        "the file is missing, is no PEM file, has a password, or certificate and key do not belong"
        " together; or the settings contradict each other.",
        "name PEM files that belong together.",
        "w5xde serve train.py --host 0.0.0.0"
        " --tls-cert cert.pem --tls-key key.pem --advertise trainer.example.org",
    ),
]
