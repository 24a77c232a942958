"""Steps on the workers of a parameter-server cluster: engine, remote calls, variables.

Synchronous strategies have their own room. `model.py` and `loop.py` know both.
"""
