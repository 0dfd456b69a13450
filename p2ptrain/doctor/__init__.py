"""The doctor: checks whether a node can work on this machine, before it starts or while it runs.

`examine` runs the checks in order, each with its deadline: `machine` (Python, torch, device, memory), `disk`, `network`
(ports, NAT, bandwidth), `exchange` (the share of time that a run's rounds spend on the line), `wsl` (Windows).
`findings` are their results, and what to do about them.
"""
