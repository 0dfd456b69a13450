"""Everything a node shows: HTTP, metrics, records and logs. It only reads, and decides nothing.

`schema` has every figure and answer once, with how it is shown (`figures`); `build` fills it from the node's view and
counters, `rounds` and `peer_history` from the records.

It is shown by HTTP (`app`, `http`, `guard`, `sockets`, `events`, the dashboard in `assets/`),
`metrics` (Prometheus), `tracking` with `tensorboard`, `wandb_run` and `wandb_child`, and `export` (one HTML file).
`logs` is the daemon's log, `news` its lines about changes, `progress` what people see while a command works.
"""
