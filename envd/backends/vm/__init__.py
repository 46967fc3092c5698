"""Code shared by the backends of virtual machines: boot media, base machines, a machine's box and process."""
