"""The server's side of operations: what envd_operations.proto offers and what watches a server.

In: the sandboxes of a server (`envd.server.sandboxes`). Out: changes of their state, snapshots sent to another server,
their files and processes, metrics, spans and the trail of calls. `envd.server.serve` alone imports it; nothing that an
episode needs does.
"""
