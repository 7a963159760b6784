"""Past one device, on torch.distributed: sequences in shards, with traffic that does not grow with them."""

from linrope.distributed.shard import Shard

__all__ = ["Shard"]
