"""Tickets, identities and what keeps a connection private: 101, 105 and 113 to 118, 410 to 414, and 5xx."""

from __future__ import annotations

from w5xde.explanations.entry import Explanation

TICKETS = [
    Explanation(
        "W5-101",
        "the ticket is damaged, or is none",
        "a ticket is one long word that begins with w5; its length and checksum show that characters are"
        " missing, were added, or changed.",
        "copy the whole line again, use a file, or make a new ticket where the coordinator runs.",
        "w5xde ticket new latest\nw5xde join @ticket train.py",
    ),
    Explanation(
        "W5-105",
        "the coordinator no longer accepts this ticket",
        "it has expired, was revoked, or has been used by as many nodes as it was made for. Nodes that came"
        " by"
        " it before stay, and come back.",
        "make a new one where the coordinator runs.",
        "w5xde ticket new latest --lifetime 7d --uses any",
    ),
    Explanation(
        "W5-113",
        "the coordinator does not know this ticket, or this node",
        "the ticket is of another run, the run was begun anew, or with --new-identity, or its register was"
        " restored from a copy"
        " that is"
        " older than the ticket. Whoever guesses is told the same.",
        "get a new ticket from who runs the coordinator.",
        "w5xde ticket list latest\nw5xde ticket new latest",
    ),
    Explanation(
        "W5-114",
        "this node is banned from the run",
        "whoever runs the coordinator keeps it out with w5xde ticket ban; or the coordinator itself turned it"
        " out, because its updates were wrong. Then nobody new comes from its address by the same ticket"
        " either.",
        "ask who runs the coordinator. A ban is for the life of the run, unless they take it back; somebody"
        " else at that address needs another ticket.",
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
        "it is looked for on the command line, in the file after an @, on standard input for -, and if"
        " nothing"
        " is said in W5XDE_TICKET.",
        "give it in one of these ways; a file is best on a machine that others use.",
        "w5xde join @ticket train.py",
    ),
    Explanation(
        "W5-117",
        "a lifetime or a number of uses makes no sense",
        "a lifetime is a number with s, m, h or d, or never; uses are a number from 1 on, or any.",
        "write it so.",
        "w5xde ticket new latest --lifetime 24h --uses 100",
    ),
    Explanation(
        "W5-118",
        "the run has no such ticket, or no such node",
        "tickets are named by how their id begins, nodes by their id or their name; local nodes have no"
        " ticket.",
        "look them up in the list.",
        "w5xde ticket list latest\nw5xde ticket ban latest lab-3",
    ),
    Explanation(
        "W5-410",
        "a file with secrets is open to others, or not ours",
        "keys, credentials and the register must be readable for their owner alone: whoever reads them can"
        " pass"
        " for this run or this node.",
        "mend the permissions; if others may have read it, remove it and start or join anew.",
        "chmod 700 ~/.local/state/w5xde\nchmod 600 ~/.local/state/w5xde/runs/*.pem",
    ),
    Explanation(
        "W5-411",
        "a file with secrets cannot be read or written",
        "the disk is full, or the folder is not writable; keys and credentials are kept in"
        " ~/.local/state/w5xde.",
        "make room, or name another folder with W5XDE_STATE.",
        "export W5XDE_STATE=/data/w5xde-state\nw5xde join @ticket train.py",
    ),
    Explanation(
        "W5-412",
        "another process holds what can be held by one alone",
        "a w5xde command was stopped half-way and keeps its lock, or 256 nodes of this machine are in the"
        " run.",
        "end that process, and try again.",
        "ps aux | grep w5xde",
    ),
    Explanation(
        "W5-413",
        "a key or a credential is damaged",
        "the file does not hold what was written into it, or is another run's.",
        "restore it from a copy; or let a coordinator make new ones and hand out new tickets; a node's can be"
        " removed: it then joins by a ticket.",
        "w5xde serve train.py --resume tuesday --new-identity",
    ),
    Explanation(
        "W5-414",
        "the run's register of tickets cannot be used",
        "tickets.json in the run folder is missing, damaged or full. It is not begun anew in silence: it"
        " knows"
        " who was let in, and who was banned.",
        "restore it from a copy, or let everybody join anew; a run that was never served has none yet.",
        "w5xde serve train.py --resume tuesday --new-identity",
    ),
    Explanation(
        "W5-501",
        "whoever answers there did not make this ticket",
        "its certificate is not the one the ticket names. The run was begun anew (or with --new-identity),"
        " moved to another machine, or"
        " somebody sits in between. Nothing was said to it.",
        "compare the fingerprint where the coordinator runs, and use a new ticket of that run.",
        "w5xde ticket list latest\nw5xde ticket new latest",
    ),
    Explanation(
        "W5-503",
        "no TLS 1.3 connection came about",
        "another program listens there, a proxy breaks connections open, the coordinator lets nobody else"
        " in for"
        " now, or its own certificate has expired or is of another name.",
        "look at the coordinator's terminal; with certificates of your own check --tls-ca, name and dates.",
        "w5xde doctor @ticket\nopenssl x509 -in cert.pem -noout -subject -dates",
    ),
    Explanation(
        "W5-504",
        "this Python's TLS can be talked past",
        "before 3.11.5 bytes that were sent before the handshake could be read as if they had come after it"
        " (CVE-2023-40217).",
        "install a newer Python.",
        "python3 --version",
    ),
    Explanation(
        "W5-505",
        "a certificate, its key or an authority cannot be used",
        "the file is missing, is no PEM, has a password, or certificate and key do not belong together; or"
        " the"
        " settings contradict each other.",
        "name PEM files that belong together.",
        "w5xde serve train.py --host 0.0.0.0"
        " --tls-cert cert.pem --tls-key key.pem --advertise trainer.example.org",
    ),
]
