"""Who is alive: one mechanism for all strategies and roles.

Each question has one module:

- Who is missing or different at the start? `preflight`
- Who has died or is frozen? `watching`
- Who is where? `barriers`
- Who is done, and did it fail? `sessions` (parameter servers), `barriers` (workers)

`wire` has the gRPC calls. Between multi-worker tasks, `barriers` uses the key-value store of
TensorFlow's coordination service.
"""
