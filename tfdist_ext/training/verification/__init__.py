"""`tfd.verify`: proves that a model trains the same on one device and on a strategy.

Here are the two trainings, the comparison of their numbers, and the experiments that find the cause
of a difference.
"""
