"""Makes a model whose variables are in the strategy, from a builder or from an existing model.

Contains copying, compiling again, making every variable before a step is traced, and the copy that
is exported. No function of this room runs a step for its result.
"""
