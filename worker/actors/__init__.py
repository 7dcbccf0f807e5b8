"""The Ray shell of the worker, and the only modules of it that import ray.

At import these modules need ray, the contract and the standard library: whoever asks Ray for a supervisor by name
imports its class, and the control plane has no torch.
"""
