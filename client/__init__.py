"""The client: producer, consumer, admin, fetch queue and runners, group rebalancing, offset storages."""

if __name__ != "metamq.client":
    raise ImportError(f"import metamq.client, not {__name__}: a bare import makes a second copy of every class")
