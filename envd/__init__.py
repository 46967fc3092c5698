"""The environment plane: sandboxes and the tool server that acts in them.

In:  templates (the files of a workspace), tool calls, and final states (diffs) to verify, over gRPC.
Out: tool results, diffs, states of sandboxes, and the outcome of each named test.

    client --gRPC--> server --Backend--> spawner, runsc, QEMU ... --> agent (process 1 of its sandbox)
                        \\___________ files, shell, processes over one stream ___________/

The server holds no code of a sandbox and trusts nothing that comes from one; what starts sandboxes is another,
single-threaded process or a program of its own; the agent runs inside. Runs alone: `python -m envd serve`. Imports
contracts and nothing else of ours. The planes beside it may import `envd.client`, which holds the few calls of an
episode, and `envd.tools`; everything above may import any of it. What operates a server is apart, in `envd.operations`,
`envd.server.operations` and `envd.mcp`.
"""
