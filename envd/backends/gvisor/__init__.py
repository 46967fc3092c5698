"""Sandboxes with a kernel of their own in user space, gVisor's `runsc`.

backend -> boxes -> bundle (what runsc is told), server -> stage (process 1 of the namespaces runsc works in)
"""
