"""linrope inside other libraries."""
