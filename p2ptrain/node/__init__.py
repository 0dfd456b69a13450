"""One running node: the driver of the core, and its access to disk, device and network."""
