"""Steps on the workers of a parameter-server cluster: engine, remote calls, variables, data.

Synchronous strategies have their own room. `programs.py` has what both engines share.
"""
