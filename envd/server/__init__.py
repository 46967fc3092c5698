"""The gRPC side: templates on disk, live sandboxes and their lifetimes, verifications, and the zygotes that fork for us.

In: protobuf requests. Out: protobuf replies. Runs no agent code. Imports envd.types, envd.errors, the frames and Linux calls of
envd.sandbox and contracts.pb; imported by `envd.__main__` only.
"""
