"""Sandboxes as virtual machines under QEMU: `machine` is one of them, told by `qmp`, started by `command`."""
