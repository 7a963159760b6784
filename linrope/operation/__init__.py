"""The operation: plans, checks, positions and features of a call, and the call itself."""
