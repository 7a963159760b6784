"""Sequences split over several devices, on torch.distributed, with traffic that does not grow with their length."""

from linrope.distributed.shard import Shard

__all__ = ["Shard"]
