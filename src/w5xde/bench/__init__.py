"""`w5xde bench`: measures w5xde on this machine beside the limits of the machine and beside other systems.

Every contestant runs in processes forked for it (on an engine: in those of its command), with one torch
thread each, and is measured in the same way.
Only the command imports this package; the rest of w5xde knows nothing of it.
"""
