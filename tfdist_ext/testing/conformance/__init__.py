"""The contract of a strategy, as tests.

Here belongs what a strategy must do: one module of checks for each part of its interface, the
probes that checks share, and `StrategyConformance`, which has all checks in one class.
"""
