"""The command `metamq plan`: the sizes of a cluster, from measured figures."""
