"""The environment plane: sandboxes and the tool server that acts in them.

In:  templates (the files of a workspace), tool calls, and final states (diffs) to verify, over gRPC.
Out: tool results, diffs, and the outcome of each named test.

    client --gRPC--> server --spawn--> zygote --fork--> agent (process 1 of its sandbox)
                        \\_____________ tool calls over a socketpair ____________/

The server holds no agent code and runs none; the zygote is single-threaded, imports no grpc and only forks; the agent
runs inside the sandbox. Runs alone: `python -m envd serve`. Imports contracts and nothing else of ours. The other
planes may import `envd.client`, `envd.local` and `envd.tools`; everything above may import any of it.
"""
