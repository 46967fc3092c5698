"""What the backends of virtual machines share: boot media, families of snapshots, a machine's box and process."""
