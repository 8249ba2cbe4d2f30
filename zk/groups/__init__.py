"""What consumer groups keep in ZooKeeper: members, plans, owners and offsets."""
