"""Everything a node shows: HTTP, metrics, records and logs. It only reads, and decides nothing.

`schema` has every figure and answer once, with how it is shown (`figures`); `build` fills it from the node's view and
counters, `rounds` from the records. `attention` says what to look at first, and when a training goes wrong.

It is shown by HTTP (`app`, `http`, `guard`, the dashboard in `assets/`), `tracking` (TensorBoard, and W&B by way of
`wandb_child`) and `export` (one HTML file). `logs` is the daemon's log, `progress` that of a command at work."""
