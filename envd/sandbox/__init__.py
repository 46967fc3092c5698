"""Code that runs outside the gRPC process: the zygote, and the agent and verifier that it forks into sandboxes.

In: requests of the server (JSON frames over a socketpair). Out: tool results, diffs, test records.
Starts must be fast, so nothing here imports grpc, protobuf or asyncio. Imports envd.types, envd.tools and envd.errors;
imported by envd.server only for the frame format and the program's name.
"""
