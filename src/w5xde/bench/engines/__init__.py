"""Runs on engines, beside what users of the engine have: our pool on Ray, and Ray Train's TorchTrainer.

Every contestant is a command in a process of its own, as a user would start it. It writes a line for each
step to a file, from which everything is computed:

    step_times   the lines, and the figures that follow from them; pure
    clusters     a Ray cluster on this machine, or the one that RAY_ADDRESS names
    timed_jobs   the jobs as `w5xde train` gets them
    ray_train    the same jobs on Ray Train
    commands     starts a contestant, watches its steps, kills one of its workers, ends it
    suite        the rows
"""
