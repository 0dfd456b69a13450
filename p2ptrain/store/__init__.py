"""What a node keeps over a restart: its log, payloads and checkpoints, in one locked directory per run and identity.

Everything here blocks, and belongs in a thread. Under its name a file is whole or is not there; what an append has
returned from survives a power cut; and what was damaged later is noticed by its digest, never believed.
"""
