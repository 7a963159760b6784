"""Past one device, on torch.distributed: sequences in shards, whose traffic does not grow with their length."""

from linrope.distributed.shard import Shard

__all__ = ["Shard"]
