"""A Llama whose attention is linear, with RoPE on the features, for transformers.

    x = embed(tokens)
    x = x + attention(norm(x));  x = x + mlp(norm(x))      for each layer
    logits = lm_head(norm(x))

Weights have Llama's names. Attention is LinearRoPEAttention, or SoftmaxAttention in some layers of a hybrid.
Both continue from a state, so that a prefill, a chunk of it and a decoding step are the same call.
"""

import os
import re
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from linrope.distributed.shard import Shard
from linrope.layer.norm import RMSNorm, silu_product
from linrope.layer.recording import TOKENS_BACK, recording
from linrope.layer.states import State
from linrope.models.huggingface.cache import LinRopeCache, StateLayer, check_lengths, copy_of
from linrope.models.huggingface.cache_name import CACHE, NAMES, BaseOutput, CausalLMOutput, either_cache_name
from linrope.models.huggingface.configuration import LinRopeConfig, make_attention
from linrope.models.huggingface.padding import count_positions, may_pad, read_rows, span
from linrope.models.huggingface.parallel import TP_HEAD
from linrope.models.huggingface.prepared import step_of_generate, with_prepared_steps
from linrope.models.huggingface.saving import auto_map, write_beside
from linrope.models.huggingface.with_states import with_states
from linrope.models.logits import kept_rows

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "out_norm", "q_norm", "k_norm")
_OWN_NAMES = {"positions": "position_ids", "state": "cache"}  # of the attention's arguments


class LinRopeMLP(nn.Module):
    """SwiGLU, W_down (silu(W_gate x) * W_up x), with Llama's names. Shazeer 2020, arXiv 2002.05202."""

    def __init__(self, config: LinRopeConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(silu_product(self.gate_proj(x), self.up_proj(x)))
        return y


class LinRopeLayer(GradientCheckpointingLayer):
    """Attention and a feed-forward network, each behind a norm and inside a residual connection."""

    def __init__(self, config: LinRopeConfig, index: int) -> None:
        super().__init__()
        assert config.layer_types is not None
        self.layer_type = config.layer_types[index]
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = make_attention(config, self.layer_type)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LinRopeMLP(config)

    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        return_state: bool = False,
        past: StateLayer | None = None,
        **tokens: Any,
    ) -> tuple[Tensor, State | None]:
        """x (b, n, hidden_size) -> the same shape, and the new state.

        past: records the call, for ``crop``. tokens: positions, key_mask, cu_seqlens and shard of the attention. The
        call must not change anything but its results: in gradient checkpointing the backward pass repeats it.
        """
        y = self.input_layernorm(x)
        if tokens.get("cu_seqlens") is not None:  # packed sequences lie in one row
            y = y.reshape(1, -1, y.shape[-1])
        try:
            y, state = self._attend(y, state, return_state, past, tokens)
        except (TypeError, ValueError) as error:
            message = re.sub(r"^\w+(?=:)", lambda match: _OWN_NAMES.get(match[0], match[0]), str(error))
            raise type(error)(message) from error
        x = x + y.view_as(x)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x, state

    def _attend(
        self,
        x: Tensor,
        state: State | None,
        return_state: bool,
        past: StateLayer | None,
        tokens: dict[str, Any],
    ) -> tuple[Tensor, State | None]:
        if past is None:
            y = self.self_attn(x, state=state, return_state=return_state, **tokens)
            return y if return_state else (y, None)
        n = x.shape[1]
        # Only the end of a long text can be removed again
        first = 0 if n <= 2 * TOKENS_BACK else n - TOKENS_BACK
        parts = []
        if first:
            y, state = self.self_attn(
                x[:, :first], state=state, return_state=True, **span(tokens, n, 0, first)
            )
            parts.append(y)
        last = x[:, first:].clone() if first else x

        before = copy_of(state)
        with recording() as made:
            y, state = self.self_attn(last, state=before, return_state=True, **span(tokens, n, first, n))
        past.record(before, n - first, *made)
        return torch.cat((*parts, y), 1) if parts else y, state


class LinRopePreTrainedModel(PreTrainedModel):
    """The base of all models: their config, their initial weights, and what transformers may do with them."""

    config: LinRopeConfig
    config_class = LinRopeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LinRopeLayer"]  # noqa: RUF012
    _skip_keys_device_placement = list(NAMES)  # noqa: RUF012
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": LinRopeLayer}  # noqa: RUF012

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Saves as other models do, and adds the files that say how to load the folder."""
        self.config.auto_map = auto_map()
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            write_beside(Path(save_directory), type(self).__name__)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Does nothing: a saved folder names linrope's classes and gets no copy of their code."""

    def _refuse_implementation(self, name: str, *_: Any, **__: Any) -> bool:
        raise ValueError(f"attn_implementation: got {name}, expected 'sdpa' or 'eager' (both call SDPA)")

    _flash_attn_can_dispatch = partialmethod(_refuse_implementation, "flash attention")
    _flex_attn_can_dispatch = partialmethod(_refuse_implementation, "flex_attention")

    def _initialize_weights(self, module: nn.Module, *args: Any) -> None:
        # Drops the flag that marks remote code: it skips modules that hold no weights themselves. Nothing is
        # lost, since _init_weights leaves loaded weights alone.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if self.config.initializer_range is not None or not isinstance(module, nn.Linear | nn.Embedding):
            super()._init_weights(module)
        else:
            init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
        if isinstance(module, LinRopeLayer) and self.config.initializer_range is None:
            # The last matrix of each residual branch.
            for end in (module.self_attn.o_proj, module.mlp.down_proj):
                init.uniform_(end.weight, -(end.in_features**-0.5), end.in_features**-0.5)
        if isinstance(module, LinRopeLayer):  # feature map, gates and convolution start as in a new layer
            special = {
                name: tensor
                for name, tensor in module.self_attn.state_dict(keep_vars=True).items()
                if name.split(".")[0] not in PROJECTIONS and not name.endswith("_extra_state")
            }
            if special:
                with torch.device("cpu"):
                    fresh = make_attention(self.config, module.layer_type).state_dict()
                for name, tensor in special.items():
                    init.copy_(tensor, fresh[name])


class LinRopeModel(LinRopePreTrainedModel):
    """Takes tokens and returns hidden states.

    >>> from linrope.models.huggingface import LinRopeConfig, LinRopeModel
    >>> model = LinRopeModel(LinRopeConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2))
    >>> model(torch.randint(50, (2, 10))).last_hidden_state.shape
    torch.Size([2, 10, 32])
    """

    def __init__(self, config: LinRopeConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LinRopeLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.causal = config.is_causal
        self.post_init()

    @either_cache_name("cache")
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: LinRopeCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        shard: Shard | None = None,
        **kwargs: Any,
    ) -> BaseOutput:
        """
        Args:
            input_ids: (b, n) integers. Give either these or inputs_embeds, (b, n, hidden_size).
            attention_mask: (b, n), or (b, tokens seen before + n) with a cache; 0: padding, on either side.
            position_ids: (n,) or (b, n). By default they continue those of the cache and skip padding. Each 0 begins
                a new sequence, as packing collators have it.
            cache: the cache of the tokens before, also as past_key_values. The call updates it.
            cu_seqlens: (s + 1,) bounds of sequences packed into a batch of one; also as cu_seq_lens_q. Or pass seq_idx
                (b, n), which numbers the sequences of each row.
            shard: a ``linrope.distributed.Shard``: the tokens are this rank's part, without padding. Layers
                with full attention take no shard, and neither does a cache with packed sequences.
        """
        if (input_ids is None) == (inputs_embeds is None):
            got = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids, inputs_embeds: got {got}, expected exactly one of them")
        if cache is not None and not isinstance(cache, LinRopeCache):
            kind = type(cache).__name__
            raise TypeError(f"cache: got {kind}, expected LinRopeCache or None")
        if kwargs.get("is_causal", self.config.is_causal) != self.causal:
            raise ValueError(f"is_causal={not self.causal}: this model was made with is_causal={self.causal}")
        if cache is not None and (not self.causal or len(cache) != len(self.layers)):
            expected = f"{len(self.layers)} layers" if self.causal else "None with is_causal=False"
            raise ValueError(f"cache: got {len(cache)} layers, expected {expected}")
        if kwargs.get("output_attentions", self.config.output_attentions):
            raise ValueError("output_attentions: got True, expected False: no layer forms attention weights")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        b, n, _ = x.shape
        if shard is not None:
            self._check_shard(attention_mask, n)
            attention_mask, cu_seqlens = None, shard.cu_seqlens

        tokens = read_rows(
            (b, n), cache, attention_mask, position_ids, cu_seqlens, kwargs, shared=shard is not None
        )
        # Gradient checkpointing is there to save memory: it gets a cache only if the caller asks for one.
        if use_cache is None:
            use_cache = self.config.use_cache and not (self.training and self.gradient_checkpointing)
        if use_cache and cache is None and self.causal and tokens["cu_seqlens"] is None:
            cache = LinRopeCache(self.config)

        if cache is not None and shard is None:
            last = step_of_generate(self, cache, x, tokens, **kwargs)
            if last is not None:
                return BaseOutput.of(last, cache)
        if shard is not None:
            tokens |= {"cu_seqlens": None, "shard": shard}
        if cache is None:
            for layer in self.layers:
                x, _ = layer(x, **tokens)
        else:
            x = self._read_on(x, cache, tokens)
            cache.length += n if shard is None else shard.total
        return BaseOutput.of(self.norm(x), cache)

    def kinds(self) -> tuple[type, ...]:
        """The classes of the model, its layers and their parts. Subclasses may compute something else."""
        return LinRopeModel, LinRopeLayer, LinRopeMLP

    def _read_on(self, x: Tensor, cache: LinRopeCache, tokens: dict[str, Any]) -> Tensor:
        """x (b, n, hidden_size) through all layers, after the tokens in the cache."""
        may_repeat = self.training and torch.is_grad_enabled()  # then a layer keeps its old state
        for layer, kept in zip(self.layers, cache.layers):
            past = kept if kept.record_past and "shard" not in tokens else None
            state = kept.state if may_repeat or past is not None else kept.take()
            x, state = layer(x, state=state, return_state=True, past=past, **tokens)
            kept.put(state)
        return x

    def _check_shard(self, attention_mask: Tensor | None, n: int) -> None:
        if "full_attention" in (self.config.layer_types or ()):
            raise ValueError("shard: got a shard, expected None with full attention, which reads all keys")
        if attention_mask is not None and may_pad(attention_mask, n):
            raise ValueError(
                "attention_mask: got padding with a shard, expected packed sequences (the shard's cu_seqlens)"
            )


class LinRopeForCausalLM(LinRopePreTrainedModel, GenerationMixin):
    """Takes tokens and returns the logits of the next token; has generate().

    On a CUDA device ``generate(.., graph=True)`` replays its steps as a CUDA graph.

    >>> from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM
    >>> model = LinRopeForCausalLM(LinRopeConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2))
    >>> model.generate(torch.randint(50, (2, 10)), max_new_tokens=5).shape
    torch.Size([2, 15])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = TP_HEAD

    def __init__(self, config: LinRopeConfig) -> None:
        if not config.is_causal:
            raise ValueError("is_causal=False: expected True in a causal language model")
        super().__init__(config)
        self.model = LinRopeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @either_cache_name("cache")
    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: LinRopeCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        shard: Shard | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Takes the arguments of ``LinRopeModel``, and labels (b, n): the tokens, or -100 for no loss.

        The call shifts the labels. With a shard they must be the next tokens already (``shard.targets``),
        since the last token's label lies on another rank. The losses of all ranks then add up to the loss:
        each is divided by the number of labels on all ranks, or by num_items_in_batch.
        """
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            cache=cache, inputs_embeds=inputs_embeds, use_cache=use_cache, shard=shard, **kwargs,
        )  # fmt: skip
        logits = self.lm_head(kept_rows(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None and shard is not None:
            loss = shard.mean_loss(logits, labels, kwargs.get("num_items_in_batch"))
        elif labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutput(
            loss=loss,
            logits=logits,
            **{CACHE: outputs.cache},
            hidden_states=outputs.hidden_states,
        )

    generate = either_cache_name(CACHE)(with_prepared_steps(GenerationMixin.generate))
    with_states = with_states

    def kinds(self) -> tuple[type, ...]:
        return LinRopeForCausalLM, *self.model.kinds()

    def _prepare_model_inputs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, str | None, dict[str, Any]]:
        """Checks the mask here, because generate() slices the inputs by it and then drops it."""
        inputs, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)  # type: ignore[misc]
        check_lengths(inputs, name or "input_ids", model_kwargs)
        return inputs, name, model_kwargs

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r}: expected None: there is only one kind of cache")
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = LinRopeCache(self.config)
            if generation_config.is_assistant:  # some of the tokens that it drafts will be rejected
                model_kwargs[CACHE].activate_past_recording()

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        recorded = isinstance(cache, LinRopeCache) and cache.is_croppable
        try:
            return super()._assisted_decoding(*args, **kwargs)  # type: ignore[misc]
        finally:
            if isinstance(cache, LinRopeCache) and not recorded:
                cache.stop_recording()

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]
    ) -> Tensor | None:
        mask = model_kwargs.get("attention_mask")  # without padding the state itself counts positions
        return None if mask is None or bool(mask.all()) else count_positions(mask)
