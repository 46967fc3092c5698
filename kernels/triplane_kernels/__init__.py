"""Numeric kernels for low-precision mixture-of-experts training, each with a torch reference implementation.

In: tensors. Out: tensors. May import torch only; Triton and a GPU are found at run time.

    blockwise, quantize   FP8 in 128x128 and 1x128 blocks, MXFP8; `rounding` is the cast itself
    gemm, grouped_gemm    block-scaled products, alone and by experts: forward, dgrad, wgrad
    permute, router       tokens to their experts and back
    norm                  root mean square norm and rotary position embedding, fused
    swiglu                the experts' activation, fused with its quantization
    loss_head             log-probability and entropy without [tokens, vocabulary]
    moe                   the differentiable expert layer made of these; `moe_weights` its codes, `moe_module` the torch
                          module
    cpu                   torch's own CPU math made to repeat to the bit

`<op>.py` is public and registers torch operators (`custom_ops`), `<op>_reference.py` is torch, `<op>_triton.py` and
`<op>_gluon.py` are imported when `machine.choose` picks them. `tuning` finds their launch configurations. See
docs/kernels.md.
"""
