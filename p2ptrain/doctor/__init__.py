"""The doctor: checks whether a node can work on this machine, before it starts or while it runs."""
