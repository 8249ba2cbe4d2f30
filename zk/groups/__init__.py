"""The nodes of consumer groups in ZooKeeper: members, plans, owners and offsets."""
