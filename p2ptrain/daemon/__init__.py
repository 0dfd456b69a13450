"""The daemon: one node of one run on this machine. It joins the core to network, disk and device."""
