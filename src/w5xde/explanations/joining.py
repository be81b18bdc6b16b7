"""1xx: joining a run, and what may be said on the wire."""

from __future__ import annotations

from w5xde.explanations.entry import Explanation

JOINING = [
    Explanation(
        "W5-102",
        "the coordinator was reached, but the conversation broke off before this node could join",
        "something listens there and hangs up, or falls silent: another program, a proxy, or a coordinator"
        " that is being stopped. Its own log says what it thought of this node.",
        "check that the address is that of a w5xde coordinator, and read its terminal or the end of its"
        " ledger.",
        "w5xde doctor 192.168.1.20:5555",
    ),
    Explanation(
        "W5-103",
        "nothing answers at that address",
        "the machine is there, or its name is not known, but no program listens on that port. A coordinator"
        " that was started without --host listens only on its own machine.",
        "start the coordinator, with --host 0.0.0.0 if others are to reach it, and use the line it prints.",
        "w5xde serve train.py --host 0.0.0.0 --ticket-file ticket\nw5xde join @ticket train.py",
    ),
    Explanation(
        "W5-104",
        "no answer came in time",
        "packets to that address are lost: a firewall drops them, the machine is off, or it is in another"
        " network.",
        "open the port in the coordinator's firewall, check the address, or join over a VPN that both are"
        " in.",
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
        "this node lost its coordinator, came back to the same address, and found another run there. It"
        " does not work for a run nobody asked it to help.",
        "join again by hand if the new run is meant.",
        "w5xde join @ticket train.py",
    ),
    Explanation(
        "W5-110",
        "the coordinator cannot listen on that address",
        "another program uses the port, the address is not one of this machine, or ports below 1024 are not"
        " allowed to this user.",
        "choose another --port (0: any that is free) or another --host.",
        "w5xde serve train.py --port 5556\nw5xde doctor",
    ),
    Explanation(
        "W5-111",
        "that is not an address, or an address was given where a ticket is needed",
        "an address is a host and a port with a colon between them; an IPv6 host stands in brackets. To"
        " join, an"
        " address is not enough: a ticket also says whom to trust there, and that you may come.",
        "copy the line that w5xde serve prints, or make a ticket there.",
        "w5xde ticket new latest\nw5xde doctor [fd00::7]:5555",
    ),
    Explanation(
        "W5-112",
        "the coordinator turned this node out",
        "it broke the protocol, fell silent, or its answers were no use or wrong; the message says which.",
        "mend what the message names, and join again; a node whose updates were wrong is banned until who"
        " runs the coordinator says otherwise (w5xde ticket unban). On one machine everything else may be"
        " fine: look at its device, memory and version with w5xde doctor.",
        "w5xde doctor\nw5xde join @ticket train.py",
    ),
    Explanation(
        "W5-120",
        "the peer said something the protocol does not know",
        "another program speaks to this port, the two versions differ, or bytes were damaged on the way."
        " Only that connection is closed; the pool goes on.",
        "if it is not a stranger, install the same version of w5xde on both machines.",
        "w5xde --version",
    ),
    Explanation(
        "W5-121",
        "the peer announced more bytes than are accepted now",
        "before a node has joined, only a short greeting is read; afterwards at most what the model's size"
        " allows. Another program, or another model, sends more.",
        "use the coordinator's job file and the same version of w5xde on every machine.",
        "w5xde join @ticket train.py",
    ),
    Explanation(
        "W5-122",
        "a compressed body does not become what it must",
        "it is cut short, longer than it may be, garbage, or in a codec that was not agreed on.",
        "install the same versions of w5xde, lz4 and zstandard everywhere; --compress none leaves codecs"
        " out.",
        "w5xde serve train.py --compress none",
    ),
]
