"""Multi-head latent attention (arXiv:2405.04434): the cache has one vector a token for all heads, from which each makes
its key and value."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.architecture.model_config import AnyRopeScaling, LatentSizes
from jaxinfer.kv_cache.pages import Pages
from jaxinfer.layers.attention import LayerAttention
from jaxinfer.layers.deferred_collectives import all_gather, axis_of_tokens
from jaxinfer.layers.linear import Linear
from jaxinfer.layers.matrices import weight
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import CosSin, rotate, score_factor
from jaxinfer.weights.formats.weight_format import ModelWeightFormat

_EPSILON = 1e-6  # of the norms inside attention, which configurations don't give


class LatentAttention(nnx.Module):
    def __init__(
        self,
        size: int,
        num_heads: int,
        sizes: LatentSizes,
        weight_format: ModelWeightFormat,
        *,
        scaling: AnyRopeScaling = None,
        interleaved: bool = True,
        use_bias: bool = False,
    ) -> None:
        """`scaling`: of RoPE, which may also scale all scores. `interleaved`: which columns are pairs, see
        `rope.rotate`."""
        self.sizes, self.interleaved = sizes, interleaved
        self.scale = sizes.head_size**-0.5 * score_factor(scaling)
        heads = {"heads": num_heads, "head_size": sizes.head_size}
        # One fused product for both latents: few large arrays, as each costs the host time a call. The weight map goes
        # by parameter name, so other source tensors need another name.
        rank = sizes.query_rank
        self.down = (
            None if rank is None else Linear({"embed": size}, {"latent": rank + sizes.latent_size}, weight_format, use_bias=use_bias)
        )
        self.query_norm = None if rank is None else RMSNorm(rank, _EPSILON, weight_format)
        self.query_up = None if rank is None else Linear({"latent": rank}, heads, weight_format)
        self.kv_down = Linear({"embed": size}, {"latent": sizes.latent_size}, weight_format, use_bias=use_bias) if rank is None else None
        self.queries = Linear({"embed": size}, heads, weight_format) if rank is None else None
        self.norm = RMSNorm(sizes.rank, _EPSILON, weight_format)
        # One matrix a head, as in checkpoints and as decode multiplies it. Always floats, since it is absorbed too.
        up_shape = (num_heads, sizes.nope_size + sizes.value_size, sizes.rank)
        self.up = weight(up_shape, ("heads", None, None), weight_format.vector_dtype)
        self.out = Linear({"heads": num_heads, "value_size": sizes.value_size}, {"embed": size}, weight_format, use_bias=use_bias)

    def project(self, x: Float[Array, "T D"], cos_sin: CosSin) -> tuple[Float[Array, "T N H"], Float[Array, "T C"]]:
        """Queries and latents of all tokens, with RoPE applied."""
        x = all_gather(x)
        sizes, rank = self.sizes, self.sizes.query_rank
        if self.kv_down is not None and self.queries is not None:
            q = self.queries(x)
            latent, shared = jnp.split(self.kv_down(x), (sizes.rank,), axis=1)
        else:
            assert rank is not None and self.down is not None and self.query_norm is not None and self.query_up is not None
            of_queries, latent, shared = jnp.split(self.down(x), (rank, rank + sizes.rank), axis=1)
            q = self.query_up(self.query_norm(of_queries))
        turned = rotate(q[..., sizes.nope_size :], cos_sin, interleaved=self.interleaved)
        key = rotate(shared[:, None], cos_sin, interleaved=self.interleaved)[:, 0]
        return jnp.concatenate([q[..., : sizes.nope_size], turned], axis=-1), jnp.concatenate([self.norm(latent), key], axis=-1)

    def __call__(self, x: Float[Array, "T D"], cos_sin: CosSin, pages: Pages, attend: LayerAttention) -> tuple[Float[Array, "T D"], Pages]:
        """`cos_sin`: of the rope_size columns."""
        q, latents = self.project(x, cos_sin)
        attended, pages = attend.latents(q, latents, jnp.transpose(self.up[...], (2, 0, 1)), pages, self.scale)
        return self.out(attended, axis_of_tokens(x)), pages


def expanded(
    latents: Float[Array, "T C"], up: Float[Array, "R N E"], head_size: int
) -> tuple[Float[Array, "T N H"], Float[Array, "T N V"]]:
    """Keys, with head_size columns, and values of every head, in the latents' type."""
    rank, num_heads, _ = up.shape
    nope_size = head_size - (latents.shape[1] - rank)
    both = jnp.einsum("tr,rne->tne", latents[:, :rank].astype(up.dtype), up, preferred_element_type=latents.dtype)
    shared = jnp.broadcast_to(latents[:, None, rank:], (len(latents), num_heads, latents.shape[1] - rank))
    return jnp.concatenate([both[..., :nope_size], shared], axis=-1), both[..., nope_size:]


def absorbed(
    q: Float[Array, "T N H"],
    up: Float[Array, "R N E"],
    latent_size: int,
    attend: Callable[[Float[Array, "T N C"]], Float[Array, "T N R"]],
) -> Float[Array, "T N V"]:
    """Attention without making keys and values: `attend` gets queries projected to latent_size columns, and returns
    what they attend to in the latents' first R columns, for every head."""
    nope_size = q.shape[2] - (latent_size - len(up))
    by_head = jnp.transpose(up, (1, 2, 0))  # as it is stored
    to_latents = _by_head(q[..., :nope_size], by_head[:, :nope_size])
    outputs = attend(jnp.concatenate([to_latents, q[..., nope_size:]], axis=-1))
    return _by_head(outputs, jnp.swapaxes(by_head[:, nope_size:], 1, 2))


def attend_over_token_shards(
    q: Float[Array, "T N C"], attend: Callable[[Float[Array, "T M C"]], tuple[Float[Array, "T M R"], Float[Array, "T M"]]], axis: str
) -> Float[Array, "T N R"]:
    """Attention of each device's own heads over a context whose tokens are split over a mesh axis; for use in a
    `shard_map`. `attend` gets the queries of all devices' heads, and returns attention over the device's own tokens
    with the log-sum-exp of scores, by which results are combined (Flash-Decoding, arXiv:2311.01282, between devices).
    Two collectives: queries, and results."""
    num_devices, num_heads = jax.lax.axis_size(axis), q.shape[1]
    out, lse = attend(jax.lax.all_gather(q, axis, axis=1, tiled=True))
    # One collective for both, as bits, which nothing rounds.
    bits = jnp.dtype(f"uint{8 * q.dtype.itemsize}")
    of_lse = jax.lax.bitcast_convert_type(lse.astype(jnp.float32), bits).reshape(*lse.shape, -1)
    both = jnp.concatenate([jax.lax.bitcast_convert_type(out.astype(q.dtype), bits), of_lse], axis=-1)
    by_device = jnp.swapaxes(both.reshape(len(q), num_devices, num_heads, -1), 0, 1)
    parts = jax.lax.all_to_all(by_device, axis, split_axis=0, concat_axis=0)  # [device, T, N, R and log-sum-exp]
    outs = jax.lax.bitcast_convert_type(parts[..., : out.shape[-1]], q.dtype).astype(jnp.float32)
    sums = parts[..., out.shape[-1] :]
    weights = jax.nn.softmax(jax.lax.bitcast_convert_type(sums if sums.shape[-1] > 1 else sums[..., 0], jnp.float32), axis=0)
    return (outs * weights[..., None]).sum(0).astype(q.dtype)


def _by_head(x: Float[Array, "T N I"], matrices: Float[Array, "N I O"]) -> Float[Array, "T N O"]:
    """Multiplied in the matrices' type, returned in x's, as `formats.plain.multiply` does. The batch dimension comes
    first: on CPU other layouts are slow, or unsupported for narrow types."""
    narrow = jnp.swapaxes(x, 0, 1).astype(matrices.dtype)
    return jnp.swapaxes(jnp.einsum("nti,nio->nto", narrow, matrices, preferred_element_type=x.dtype), 0, 1)
