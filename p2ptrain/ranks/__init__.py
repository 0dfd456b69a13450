"""One node, several devices of one owner: processes that take the steps of a round together, by torch.distributed.

`devices` chooses them, by the node's config and what the machine has. `group`, in the node's process, starts the ranks,
hands a round to them, and brings back what they made of it. `agent`, a process of its own with torch's elastic agent,
starts the ranks and ends them together. `rank` is a process for each device: its part of each step's sequences, and the
same inner step as all; in `sharded` one that holds a part of the model. `together` has what all ranks do, `channel` the
messages between node and ranks and the memory that both map. `machines`: how those on other machines of the owner come.

The node stays one replica, one identity and one contribution: its learner keeps residual and saved state, and only
steps are taken here. So neither payload, root nor what is saved depends on the number of ranks, and a rank that dies
takes nothing along but the round that was being trained. The node itself never imports torch.distributed."""
