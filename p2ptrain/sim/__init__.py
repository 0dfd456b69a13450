"""The simulator: many nodes in one process, under virtual time and every fault we can think of, all from one seed.

The production core runs here; network, disk, trainer and clock are models. After the simulators of FoundationDB (Zhou
et al. 2021) and TigerBeetle: a seed repeats a run exactly, the options themselves are drawn from seeds (`swarm`, after
Groce et al. 2012), and checkers watch the invariants.

- A simulation: `scenario` describes it, `cluster` runs the nodes on a `calendar` of virtual time and carries out their
  effects, `outcome` compares the result with what was expected, and tells it.
- One node: `machine`, with its disk; `devices` and `keys`.
- The `world` that all of them see, with what is measured: `network` over a `topology`, `faults`.
- Lies: `liars` names them all, `rewriting` makes a liar of an honest node; `round_lies`, `branch_lies`, `noise`.
- What is checked: `watch` shows `checkers` what honest nodes do, with a `ledger` of rosters and decisions; `succession`
  is what owners do, and whether a run ends as its manifests say."""
