"""Engines: clusters that place the processes of a run, and start them again when they die.

An engine minds the commands that a user would type, `w5xde serve` and `w5xde join`: it starts them where
there is room, starts them again, and lets them leave politely. The run itself is the commands' concern, so
that nothing here knows how anything is trained.

    words      the words of those commands, from the settings of `w5xde train`
    minded     one such command as a child of this process
    restarts   what follows when it ends: again, over, or a failure to be shown
    told       the error that a command printed, raised again where its user is
    ray        a pool on a Ray cluster
"""
