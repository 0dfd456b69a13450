"""One running node: the driver of the core, and its access to disk, device and network.

- Before a start: `find` (which run to join), `consent` (asks the owner), `invitations`, `begun` (runs begun here),
  `home` (what is on this disk, and where), `saved` (models on it, read-only), `socket_directory`.
- At work: `intake` queues events for the core, `driver` hands them over and carries out effects, by way of `edges`;
  `persistence` writes, `event_log` keeps what a replay needs.
- With peers: `served_blobs` and `fetching` give and get large data, `payload_fetches` gets contributions, checked,
  and `strangers` bounds what unknown peers cost.
- What was agreed on: `replica_thread` applies it at once. Training: `trainings` has it done, `work` is what the node
  asks of a worker, `local_worker` has a device of this machine, `pacing` its speed; `model_progress` measures the
  held-out loss, `audits` the contributions of others.
- The owner and the machine: `control` is the socket for commands, `owner` carries them out; `limits`, `gpu_use`,
  `energy` and `lag` watch the machine, `notify` speaks to systemd.
"""
