"""The data that survives a restart: log, payloads and checkpoints, in one locked directory per run and identity.

Everything here blocks, and belongs in a thread. A file has its final name only once it is complete; whatever an append
returned for survives a power cut; later damage is detected by digests, and damaged data is never used.

`store` is all of it together. `log` is the write-ahead log and `segment` its byte format; `checkpoints`, `payloads` and
`diary` (the trainings since) are what a restart needs; `mismatches` counts wrong states of this machine. `records` is
history for people, in sqlite. `backup` copies certified states elsewhere, with their proof. `lock` ends with its
process, `formats` is the version in small JSON files."""
