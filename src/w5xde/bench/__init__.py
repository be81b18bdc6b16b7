"""`w5xde bench`: how fast this is here, beside what the machine allows and what others reach on it.

Every contestant runs in processes forked for it, with one torch thread each, and is measured in the same way.
The product never imports this package; only the command does, when it is asked to.
"""
