"""Everything with tensors in it: model, data, transform, codec, aggregate, recipes, trainer.

Nothing here opens a socket or runs an event loop; a recipe or an aggregate never communicates.
"""
