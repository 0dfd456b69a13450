"""Verifies a run's history from the files that a node has kept, without the node, its peers or the network.

The audit does not trust the directory's own claims: it derives the agreed states from the manifests, starting at
genesis, and applies the rounds again. It only reads and takes no lock, so it can examine a running node.

`run` goes through a directory from one end to the other: `history` verifies the log (who certified which rounds, and
how the roster came to be), `weights` payloads and checkpoints, and replays the rounds. `findings` are the results and
their summary. `receipt` proves in one file what a key has contributed, and `contribution` measures one contribution
again, as the members did.

Its limits: the availabilities of decided rounds are not kept, so it cannot tell whether a quorum left out something
that it should have taken (`core.manifest.contradiction` says how far it looks). And if a quorum has signed two
histories, each of them verifies: compare a state root with somebody who should have the same one."""
