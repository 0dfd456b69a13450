"""The models: their kinds, their weights from elsewhere, and their export.

`kinds` lists all kinds: `built_in`, `hf_model` (transformers) and `plugins` (other people's), with `adapters` (LoRA) on
top. `given_weights` reads weights that the owner has, `export` with `tensor_file` writes them, `sample` continues a
text.
"""
