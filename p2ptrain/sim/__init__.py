"""The simulator: many nodes in one process, under virtual time and every fault we can think of, all from one seed.

The production core runs here; network, disk, trainer and clock are models. After the simulators of FoundationDB (Zhou
et al. 2021) and TigerBeetle: a seed repeats a run exactly, the options themselves are drawn from seeds (`swarm.py`,
after Groce et al. 2012), and checkers watch the invariants.
"""
