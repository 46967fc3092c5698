"""Sandboxes as virtual machines under QEMU: `machine` controls one, by `qmp`; `command` builds its command line."""
