"""Common parts of the gRPC servers of all planes: addresses, TLS, bearer keys, and who is calling.

    listening    the address of a server and the credentials that it asks for
    keys         the interceptor that refuses calls without a key; `caller` tells whose call is being answered
    meeting      where a server and the clients of the same user find each other's socket and key
    connecting   what a client and a server agree on: metadata, addresses, files of keys and certificates

The one part of contracts that imports grpc: only who names its modules loads it. May import contracts.
"""
