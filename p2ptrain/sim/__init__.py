"""The simulator: many nodes in one process, under virtual time and every fault we can think of, all from one seed.

The production core runs here; network, disk, trainer and clock are models. After the simulators of FoundationDB (Zhou
et al. 2021) and TigerBeetle: a seed repeats a run exactly, the options themselves are drawn from seeds (`swarm`, after
Groce et al. 2012), and checkers watch the invariants.

- A simulation: `scenario` describes it, `setup` makes its parts, `cluster` runs the nodes on a `calendar` of virtual
  time, `outcome` compares the result with what was expected.
- One node: `machine`, with `executor` (carries out effects), `devices`, `disk` and `keys`.
- The `world` that all of them see: `network` over a `topology`, `faults`.
- Lies: `liars` names them all, `rewriting` makes a liar of an honest node; `round_lies`, `branch_lies`, `noise`,
  `collusion`, `audit_lies`.
- What is checked: `watch` shows `checkers` what honest nodes do, with a `ledger` of rosters and decisions.
- Afterwards: `measurements` and `report`.
"""
