"""A pool on a Ray cluster: restartable actors mind the coordinator and the nodes, and a driver shows the run.

    driver     what `w5xde train --engine ray` does: places the actors, shows the run, and ends it
    cluster    which hosts there are, and whether a run can work there
    actors     the processes that Ray places and starts again
    lookout    whether the cluster still knows an actor, and whether its host is about to be taken away
    feed       what a coordinator's actor tells drivers

The package `ray` is imported by these modules alone, and only when a run asks for it.
"""
