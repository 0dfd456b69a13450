"""The models: their kinds, their weights from elsewhere, and their export.

`kinds` lists all kinds: `built_in`, `hf_model` (transformers) and `plugins` (other people's), with `adapters` (LoRA) on
top; `loss` computes their loss, in `loss_program` on a card. `given_weights` reads weights that the owner has, `export`
with `tensor_file` writes them, `sample` continues a text."""
