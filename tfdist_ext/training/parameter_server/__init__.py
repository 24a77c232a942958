"""Steps on the workers of a parameter-server cluster: engine, remote calls, variables.

Synchronous strategies have their own room. `distribution.py` and `loop.py` use both.
"""
