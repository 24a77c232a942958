"""Steps on the workers of a parameter-server cluster, sent there by this process.

Here belong its engine, the remote calls, a worker's view of variables, and data that workers
read. Synchronous strategies are next door and not known here; what both do alike is in
`programs.py`.
"""
