"""Guest images for the backends that boot machines: a kernel, an initial ramdisk and a read-only root file system, from
Debian's packages.

`python -m envd.images.build --out DIR` makes one through the machine's own apt. The agent and the first program are not
in it: a backend adds its own (`initramfs.with_agent`), so an image does not go stale beside a newer envd.
"""
