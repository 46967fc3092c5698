"""The guest agent of a sandbox and the way to talk to it: one protocol over a byte stream, whatever the sandbox is.

In a sandbox runs the native agent (envd/native/guest.h). The server holds the other
end of the stream (a socketpair, pipes, a serial port, vsock) in a `GuestLink`. Backends start agents; services use
links.
"""
