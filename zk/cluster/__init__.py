"""The nodes of brokers and administrators in ZooKeeper: masters, replicas, offers, topics."""
