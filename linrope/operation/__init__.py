"""The operation: what a call is, its checks, and the call itself."""
