"""One replica's step: what is in its scope, and what is replaced in Keras while it is traced.

Contains the part of the batch that a replica holds, what a step writes and logs, exact losses
and gradients, and the check that no release of Keras goes past them.
"""
