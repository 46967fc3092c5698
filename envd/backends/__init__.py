"""What sandboxes are made of: one small protocol (`envd.backends.base`), one file a backend, each with a probe that
really starts one.

A backend turns a `BoxSpec` into a running `Box` with a guest agent in it. It knows nothing of gRPC, ids, tokens or
tools.
"""
