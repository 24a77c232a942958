"""Makes a model whose variables are in the strategy, from a builder or from an existing model.

Contains moving variables, and making every variable before a step is traced. No function of this
room runs a step for its result.
"""
