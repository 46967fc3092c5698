"""Code for vLLM's processes: this folder is on their PYTHONPATH, and `--worker-extension-cls
triplane_vllm.WorkerExtension` loads it.

The rest of Triplane is not available there: `triplane_vllm` imports only torch, safetensors and the standard library,
and Triplane never imports it.
"""
