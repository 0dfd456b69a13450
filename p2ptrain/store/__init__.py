"""The data that survives a restart: log, payloads and checkpoints, in one locked directory per run and identity.

Everything here blocks, and belongs in a thread. A file has its final name only once it is complete; whatever an append
returned for survives a power cut; later damage is detected by digests, and damaged data is never used.
"""
