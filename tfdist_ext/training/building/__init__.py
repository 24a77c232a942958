"""Makes a model whose variables are in the strategy, from a builder or from an existing model.

Here are cloning, compiling again, and making every variable before a step is traced. Nothing here
runs a step for its result.
"""
