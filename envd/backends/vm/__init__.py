"""What the backends of virtual machines share: boot media, base machines, a machine's box and process."""
