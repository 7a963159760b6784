"""The plan by which transformers splits a model's heads and hidden units over processes."""

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

HEADS = "linrope_heads"

try:
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import TensorParallelLayer
except ImportError:  # this version of transformers splits parameters one by one
    TP_PLAN, TP_HEAD = None, None
else:
    TP_PLAN = {
        "layers.*.self_attn": HEADS,
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    TP_HEAD = {"lm_head": "colwise_gather_output"}

    class _Heads(TensorParallelLayer):
        """``linrope.models.tensor_parallel.HeadParallel`` for a model whose weights are loaded afterwards."""

        def install_forward(self, module: nn.Module, mesh: "DeviceMesh") -> Any:
            from torch.distributed.tensor.parallel import parallelize_module

            from linrope.models.tensor_parallel import HeadParallel

            return parallelize_module(module, mesh, HeadParallel(), src_data_rank=None)

    ALL_PARALLEL_STYLES.register(HEADS, _Heads())  # type: ignore[arg-type]
