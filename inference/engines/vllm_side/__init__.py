"""What runs inside vLLM's processes: this folder goes on their PYTHONPATH, `--worker-extension-cls
triplane_vllm.WorkerExtension` loads it.

Nothing else of ours is there: `triplane_vllm` imports torch, safetensors and the standard library, and is imported by
nothing here.
"""
