"""What the control plane and the workers agree on: spec, plan, states, messages and metrics. Depends on pydantic alone.

Import from the module that owns the concept (``worker.contract.spec``, ``worker.contract.messages``, ...); this file
re-exports nothing, so that a name has one address.
"""
