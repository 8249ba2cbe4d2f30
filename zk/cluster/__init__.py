"""What brokers and administrators keep in ZooKeeper: masters, replicas, offers, topics."""
