"""Verifying a run's history from what a node has kept of it, without the node, its peers or the network.

Nothing here believes what the directory says about itself: not the agreed states in the log, but what the manifests
lead to from genesis; not that a round was applied, but what applying it again gives. It reads, takes no lock and
changes nothing, so that it may look at the directory of a node that is running.

    findings.py   what was found, and what it comes to
    history.py    the log: who certified which rounds, and how the roster came to be
    weights.py    payloads, checkpoints, and the rounds applied once more
    tensors.py    the weights in a trainer's file
    run.py        a directory from one end to the other

What it cannot see: the availabilities of decided rounds are not kept, so whether a quorum left something out that it
should have taken stays open (`core.manifest.contradiction` says how far it looks). And what a quorum has signed twice,
in two histories, verifies twice: compare a state root with somebody who should have the same.
"""
