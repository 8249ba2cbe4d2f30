"""The role of a replica: master, slave, or waiting; who exchanges it, and when a slave takes over by itself."""

if __name__ != "metamq.broker.roles":
    raise ImportError(
        f"import metamq.broker.roles, not {__name__}: a bare import makes a silent second copy of every class"
    )
