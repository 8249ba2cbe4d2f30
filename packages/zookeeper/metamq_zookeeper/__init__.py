"""The jars of the Apache ZooKeeper server, in the folder `jars`. metamq.zk.server.jars finds them."""
