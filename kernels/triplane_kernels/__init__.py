"""Numeric kernels for low-precision mixture-of-experts training, each with a torch reference that is always right.

In: tensors. Out: tensors. May import torch only; Triton and a GPU are found at run time.
"""
