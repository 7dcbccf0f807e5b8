"""One training process and its Ray shell; ``worker.contract`` is what it shares with the control plane."""
