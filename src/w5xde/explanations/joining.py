"""Codes 1xx: joining a run, and the protocol."""

from __future__ import annotations

from w5xde.explanations.explanation import Explanation

JOINING = [
    Explanation(
        "W5-102",
        "the coordinator was reached, but the connection ended before this node could join",
        "something listens there and hangs up, or stays silent: another program, a proxy, or a"
        " coordinator that is being stopped. The coordinator's own log says why it ended the connection.",
        "check that the address is that of a w5xde coordinator, and read its terminal or the end of its"
        " ledger.",
        "w5xde doctor 192.168.1.20:5555",
    ),
    Explanation(
        "W5-103",
        "nothing answers at that address",
        "the machine is there, or its name is not known, but no program listens on that port. A"
        " coordinator that was started without --host listens only on its own machine.",
        "start the coordinator, with --host 0.0.0.0 if other machines must reach it, and use the line"
        " that it prints.",
        "w5xde serve train.py --host 0.0.0.0 --ticket-file ticket\nw5xde join @ticket",
    ),
    Explanation(
        "W5-104",
        "no answer came in time",
        "packets to that address are lost: a firewall drops them, the machine is off, or it is in another"
        " network.",
        "open the port in the coordinator's firewall, check the address, or join through a VPN that both"
        " machines use.",
        "sudo ufw allow 5555/tcp\nw5xde doctor 192.168.1.20:5555",
    ),
    Explanation(
        "W5-107",
        "the two machines speak different versions of the protocol",
        "w5xde was updated on one of them only.",
        "install the same version of w5xde on both.",
        "w5xde --version\npip install w5xde==0.1.0",
    ),
    Explanation(
        "W5-109",
        "the coordinator there now serves another run",
        "this node lost its coordinator, connected to the same address again, and found another run"
        " there. It does not work for a run that its user did not choose.",
        "join again by hand if you mean the new run.",
        "w5xde join @ticket",
    ),
    Explanation(
        "W5-110",
        "the coordinator cannot listen on that address",
        "another program uses the port, the address does not belong to this machine, or this user may not"
        " use ports below 1024.",
        "choose another --port (0: any that is free) or another --host.",
        "w5xde serve train.py --port 5556\nw5xde doctor",
    ),
    Explanation(
        "W5-111",
        "that is not an address, or an address was given where a ticket is needed",
        "an address is a host and a port with a colon between them; an IPv6 host is in brackets. To join,"
        " an address is not enough: a ticket also says which certificate to trust, and has the secret"
        " that admits a node.",
        "copy the line that w5xde serve prints, or make a ticket there.",
        "w5xde ticket new latest\nw5xde doctor [fd00::7]:5555",
    ),
    Explanation(
        "W5-112",
        "the coordinator turned this node out",
        "the node broke the protocol, was silent, or its answers failed or were wrong; the message says"
        " which.",
        "fix what the message names, and join again. A node whose updates were wrong stays banned until"
        " the user of the coordinator lifts the ban (w5xde ticket unban). If other machines have no"
        " trouble, check this one's device, memory and version with w5xde doctor.",
        "w5xde doctor\nw5xde join @ticket",
    ),
    Explanation(
        "W5-120",
        "the peer sent something that the protocol does not allow",
        "another program connects to this port, the two versions differ, or bytes were damaged on the"
        " way. Only that connection is closed; the pool goes on.",
        "if the peer is one of your machines, install the same version of w5xde on both.",
        "w5xde --version",
    ),
    Explanation(
        "W5-121",
        "the peer sent more bytes than are accepted now",
        "before a node has joined, only a short greeting is read; afterwards at most what the model's"
        " size allows. Another program, or another model, sends more. A node ends with this error if not"
        " even one batch fits into its memory.",
        "use the coordinator's job file and the same version of w5xde on every machine; for a node with"
        " little memory, use smaller batches.",
        "w5xde join @ticket\nw5xde serve train.py --batch-size 8",
    ),
    Explanation(
        "W5-122",
        "a compressed body cannot be decoded",
        "it is cut short, longer than it may be, garbage, or in a codec that was not agreed on.",
        "install the same versions of w5xde, lz4 and zstandard everywhere; --compress none leaves codecs"
        " out.",
        "w5xde serve train.py --compress none",
    ),
]
