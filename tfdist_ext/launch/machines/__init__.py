"""A run on several machines: a `tfdist run` on each, of which the first one decides for all.

Node 0 listens at the rendezvous. The others connect, and say what is free on their machine; node 0
makes the plan, with the addresses of all tasks, and each starts its own. What happens to a task is
told to node 0, which treats it as a task of its own: one root cause, one report, one decision about
another start. Nobody sends a command: each node runs the one that it was started with.
"""
