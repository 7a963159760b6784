"""The operation: the request, its checks, and the steps that answer it."""
