"""The distributed Muon runtime: routing, ownership, communication, kernels and state. Depends on torch alone."""
