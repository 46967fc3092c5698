"""Which model servers a fleet of GPUs should run, on whole GPUs or MIG slices.

    mig       what a GPU can be divided into, and where
    fleet     the file that names GPUs and services, and how many sequences a server holds where
    solver    the best placement, as an integer program

Nothing here changes a GPU.
"""
