"""The doctor: checks whether a node can work on this machine, before it starts or while it runs.

`examine` runs the checks in order, each with its deadline: `machine` (Python, torch, device, memory, WSL2), `disk`,
`network` (ports, NAT). `findings` are their results and what to do; `measure` says what the device could train."""
