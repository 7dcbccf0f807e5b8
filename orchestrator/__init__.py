"""The control plane: HTTP, job store, queue, reconciler, exporter and command line. Never imports torch."""
