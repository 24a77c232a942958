"""A builder, or a model that exists, as a model whose variables are in the strategy.

Here belong cloning, compiling again, and making every variable before a step is traced.
Nothing here runs a step for its result.
"""
