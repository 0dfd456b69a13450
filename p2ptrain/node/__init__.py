"""One running node: the driver of the core, and its access to disk, device and network.

- Before a start: `find` (which run to join, and with which invitation), `consent` (asks the owner), `home` (what is on
  this disk, and where), `saved` (models on it, read-only), `socket_directory`.
- At work: `intake` queues events for the core, `driver` hands them over and carries out effects, by way of `edges`;
  `persistence` writes.
- With peers: `served_blobs` and `fetching` give and get large data.
- What was agreed on: `replica_thread` applies it at once. Training: `trainings` has it done, and measures the held-out
  loss; `work` is what the node asks of a worker, `local_worker` has a device of this machine, `pacing` its speed;
  `audits` measures the contributions of others.
- The owner and the machine: `control` is the socket for commands, `owner` carries them out, `agenda` follows what
  members want the run to become, `heirs` goes over to it; `limits`, `clock` and `gpu_use` watch the machine, `notify`
  speaks to systemd."""
