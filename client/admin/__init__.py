"""Administration: topics, groups, replicas, brokers, transactions."""
