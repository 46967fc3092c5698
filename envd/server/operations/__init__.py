"""The server's side of operations: the services of envd_operations.proto, and the monitoring of a server.

In: the sandboxes of a server (`envd.server.sandboxes`). Out: state changes, snapshots sent to another server, files and
processes of sandboxes, metrics, spans and the trail of calls. Only `envd.server.serve` imports this package; the code
that an episode needs does not.
"""
