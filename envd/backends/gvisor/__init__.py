"""Sandboxes with their own kernel in user space, gVisor's `runsc`.

backend -> boxes -> bundle (runsc's configuration), server -> stage (process 1 of the namespaces in which runsc runs)
"""
