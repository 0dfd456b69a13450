"""The doctor: whether a node can work on this machine, found out before or while it does."""
