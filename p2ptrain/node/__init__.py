"""One node at work: the core's driver and everything that it reaches disk, device and network through."""
